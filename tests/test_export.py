"""Folders for transformers and sentence-transformers, load(), and runs that start from a BERT."""
import json
import shlex
import shutil
import sys

import pytest
import torch
from conftest import refused, tiny, words
from huggingface_hub import ModelCard

import train
from model import EncoderConfig, MaskedLM, SequenceClassifier
from prepare_data import SPECIAL_PIECES, copy_tokenizer, load_meta, load_tokenizer

transformers = pytest.importorskip('transformers')
SHAPE = {'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32, 'block_size': 32, 'dropout': 0.0}


def make_run(folder, corpus, kind=MaskedLM, content=(), **fields):
    """A run of random weights, or a trial, as train.py and finetune.py write them -> folder as a str

    content  more entries of the checkpoint
    """
    torch.manual_seed(1)
    meta = load_meta(corpus)
    model = kind(EncoderConfig(**{'vocab_size': meta['vocab_size'], **SHAPE, **fields}))
    if kind is SequenceClassifier:
        torch.nn.init.normal_(model.classifier.bias)    # it starts at 0
    folder.mkdir(parents=True)
    copy_tokenizer(load_tokenizer(corpus), str(folder))
    name = 'model.pt' if 'head' in content else 'ckpt_0000001.pt'
    train.write_checkpoint(str(folder / name), {
        'model': model.state_dict(),
        'model_config': vars(model.config),
        'data': meta['identity'],
        'config': {'objective': 'mlm', 'data_dir': 'gone', 'dataset': 'tiny'},
        'step': 1,
        'samples': 8,
        **dict(content)})
    return str(folder)


def row_of(tokenizer, *texts):
    """(ids (1, T), segments): [CLS] first [SEP] second [SEP]"""
    ids = [tokenizer.special_ids['cls']]
    segments = [0]
    for number, part in enumerate(tokenizer.encode(list(texts))):
        ids += [*part, tokenizer.special_ids['sep']]
        segments += [number] * (len(part) + 1)
    return torch.tensor([ids]), torch.tensor([segments])


@pytest.fixture(params=['absolute', 'rope'])
def exported(request, corpus, tmp_path, stage):
    """(our model, our tokenizer, the exported folder)"""
    run = make_run(tmp_path / 'run', corpus, attention='shared', position=request.param)
    assert stage('train', f'--out_dir={run}', f'--export={tmp_path}/out').code == 0
    model, tokenizer, _ = train.load(run)
    return model, tokenizer, tmp_path / 'out'


def test_auto_classes_open_the_folder(exported):
    """The same logits of the masked LM and states of the encoder; the same row of a pair of texts."""
    model, tokenizer, folder = exported
    ids, segments = row_of(tokenizer, 'returns the list', 'of a file')
    twin = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert (twin(ids, token_type_ids=segments).logits - model(ids, segments=segments)).abs().max() < 1e-4
    twin_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    row = twin_tokenizer('returns the list', 'of a file', return_tensors='pt')
    assert torch.equal(row['input_ids'], ids)
    assert torch.equal(row['token_type_ids'], segments)
    states = transformers.AutoModel.from_pretrained(folder).eval()(**row).last_hidden_state
    assert (states - model.encoder(ids, segments)).abs().max() < 1e-4


@pytest.mark.slow
def test_sentence_transformers_open_the_folder(exported):
    """As the mean of the states over [CLS], the tokens and [SEP]."""
    package = pytest.importorskip('sentence_transformers')
    model, tokenizer, folder = exported
    texts = ['The parser.', 'It reads two files.']
    for text, vector in zip(texts, package.SentenceTransformer(str(folder)).encode(texts), strict=True):
        states = model.encoder(row_of(tokenizer, text)[0])[0]
        assert (states.mean(0) - torch.tensor(vector)).abs().max() < 1e-4


def test_a_run_starts_from_a_bert(corpus, tmp_path, stage, run):
    """The exported weights come back. A BERT of another size or with another tokenizer is refused."""
    ours = make_run(tmp_path / 'ours', corpus)
    bert = tmp_path / 'bert'
    assert stage('train', f'--init_from={ours}', f'--export={bert}').code == 0
    knobs = {'init_from': 'bert', 'max_iters': 1, 'learning_rate': 0}
    run('a', **knobs)
    before, after = (train.load(folder)[0].state_dict() for folder in (ours, 'a'))
    assert all(torch.equal(x, before[name]) for name, x in after.items())
    assert 'has n_layer=2, this run has n_layer=3' in run('b', 2, **knobs, n_layer=3).err
    file = bert / 'tokenizer.json'
    file.write_text(file.read_text().replace('\u2581the"', '\u2581eht"'))       # of the same size
    assert 'bert has another tokenizer than' in run('c', 2, **knobs).err
    file.unlink()
    (bert / 'sentencepiece.model').unlink()
    (bert / 'vocab.txt').write_text('\n'.join(SPECIAL_PIECES))
    assert 'bert has another tokenizer than' in run('c', 2, **knobs).err


def test_what_cannot_be_exported_is_refused(corpus, tmp_path, stage):
    """A model that no BERT equals writes nothing; no file of a folder is overwritten."""
    def export(**fields):
        run = make_run(tmp_path / fields['position'], corpus, **fields)
        return stage('train', f'--init_from={run}', f'--export={tmp_path}/out')
    assert 'no twin' in refused(export(position='rab'))
    assert not (tmp_path / 'out').exists()
    (tmp_path / 'out').mkdir()
    assert export(position='absolute').code == 0
    assert 'out: the folder is not empty, choose another one' in refused(export(position='rope'))


@pytest.mark.parametrize('head, labels, scale, problem', [
    ('classify', ('no', 'perhaps', 'yes'), (0.0, 1.0), None),
    ('regress', (), (240.0, 2.5), 'regression')])
def test_a_trial_is_exported_with_its_labels_or_scale(head, labels, scale, problem, corpus, tmp_path, stage):
    """Values are not standardised ones, and not the sigmoid that `pipeline` gives of other classifiers."""
    content = {'head': head, 'task': 'sst2', 'labels': labels, 'scale': scale}
    trial = make_run(tmp_path / 'trial', corpus, SequenceClassifier, content, n_label=len(labels) or 1)
    assert stage('train', f'--init_from={trial}', f'--export={tmp_path}/out').code == 0
    model, tokenizer, _ = train.load(trial)
    twin = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'out').eval()
    ids, _ = row_of(tokenizer, 'the parser')
    assert (twin(ids).logits - (scale[0] + scale[1] * model(ids))).abs().max() < 1e-4
    assert twin.config.problem_type == problem
    assert twin.config.id2label == dict(enumerate(labels or ('LABEL_0',)))
    assert twin.config.label2id == {label: number for number, label in twin.config.id2label.items()}


def card_of(stage, source, folder):
    """The model card of an exported run, and its indented lines as {name: the last text}."""
    assert stage('train', f'--init_from={source}', f'--export={folder}').code == 0
    card = ModelCard.load(folder / 'README.md', ignore_metadata_errors=False)
    facts = [line[4:].split(': ', 1) for line in card.text.splitlines() if line.startswith('    ')]
    return card, {fact[0]: fact[-1] for fact in facts}


@pytest.mark.parametrize('name', ['tiny', 'a: "b" \'c\' ``` --- {task} # é \U0001f600'])
def test_a_card_says_what_the_files_know(name, corpus, stage, tmp_path, monkeypatch):
    """Of a run, of the same run that went on, of a trial that began with it, and if the corpus is gone."""
    monkeypatch.chdir(tmp_path)
    data = shutil.copytree(corpus, tmp_path / name)
    units = json.loads((data / 'units.json').read_text())
    units['units'][0]['hub'] = {'hub_id': 'owner/texts'}
    (data / 'units.json').write_text(json.dumps(units))
    commands = []
    for more in {'max_iters': 4}, {'max_iters': 6, 'eval_interval': 5}:
        assert stage('train', *tiny(str(data), 'run', **more)).code == 0
        commands.append('python ' + shlex.join(sys.argv))
    card, facts = card_of(stage, 'run', tmp_path / 'out')
    assert (card.data.library_name, card.data.pipeline_tag) == ('transformers', 'fill-mask')
    assert card.data.tags == ['thinbert', 'original', 'absolute']
    assert card.data.datasets == ['owner/texts']
    log = train.read_metrics('run')
    loss = [line['loss'] for line in log if line['kind'] == 'val'][-1]
    assert f'step 6, unigram {load_meta(data)["unigram_entropy"]:.4g}, loss {loss:.4g}' in str(facts)
    assert (facts['steps'], facts['tokens seen']) == ('6', f'{6 * 8 * 32:,}')
    assert 'attention=original, position=absolute' in facts['system']
    for command in commands:
        assert f'    command: {command}' in card.text

    for file in 'ab':
        rows = [f'the list {file}{i},yes: "1"\na file {file}{i},no\n' for i in range(8)]
        (tmp_path / f'{file}.csv').write_text('text,label\n' + ''.join(rows))
    knobs = {'init_from': 'run', 'tasks': 'custom', 'train_file': 'a.csv', 'dev_file': 'b.csv',
             'texts': 'text', 'label': 'label', 'trials': 1, 'epochs': 1, 'device': 'cpu', 'dtype': 'float32',
             'out_dir': 'tuned'}
    assert stage('finetune', *words(**knobs)).code == 0
    command = 'python ' + shlex.join(sys.argv)
    shutil.rmtree('run')
    card, facts = card_of(stage, 'tuned/run/custom_1', tmp_path / 'tuned_out')
    assert (card.data.pipeline_tag, card.data.datasets) == ('text-classification', ['owner/texts'])
    assert (facts['task'], facts['classes']) == ('custom', 'no, yes: "1"')
    scores = json.loads((tmp_path / 'tuned/run/custom_1/result.json').read_text())['scores']['custom']
    assert facts['scores, custom'] == train.shown(scores)
    assert facts['command'].startswith(command)
    assert f'loss {loss:.4g}' in facts['pretraining, last validation, losses in nats']


def test_a_card_leaves_out_what_no_file_says(corpus, stage, tmp_path, monkeypatch):
    """The run is the current folder."""
    monkeypatch.chdir(make_run(tmp_path / 'run', corpus))
    card, facts = card_of(stage, '.', tmp_path / 'out')
    assert card.data.datasets is None
    assert [*facts] == ['system', 'parameters', 'corpus', 'steps', 'tokens seen']
