"""Models and tokenizers for transformers, and load(): the same logits, ids and predictions from a folder.

    $ THINBERT_DATA=../shared/data python -m pytest tests/test_export.py       # with a megabyte of Wikipedia
"""
import ast
import base64
import json
import os
import re
import shutil
import tarfile

import pytest
import torch
from conftest import ROOT, stage, train
from test_finetune import QUICK, folder_of, pretrained, published
from test_train import run_here

import prepare_data
import train as source
from configurator import UserError
from finetune import TASKS
from model import MaskedLM, SequenceClassifier, SpanClassifier
from prepare_data import TOKENIZERS, load_tokenizer
from train import load

transformers, tokenizers = pytest.importorskip('transformers'), pytest.importorskip('tokenizers')
convert_slow_tokenizer = pytest.importorskip('transformers.convert_slow_tokenizer')


STARS = [n * '*' for n in range(2, 80)]         # pieces of equal score in any order


# ---- tokenizers ----

def sentences(texts):
    """Sentences and lines: in texts of thousands of tokens sentencepiece's float32 sums lose digits."""
    return [part for text in texts for part in re.split(r'(?<=[.!?])\s+|\n', text) if part.strip()]


@pytest.fixture(scope='module')
def english(corpus):
    with open(os.path.join(corpus, 'docstrings.jsonl'), encoding='utf-8') as file:
        return sentences(json.loads(line)['text'] for line in file)


def make_vocabulary(kind, folder, texts):
    """Write a tokenizer's file in `folder`; returns the facts that go with it."""
    config = {'vocab_size': 600, 'lower_case': True}
    if kind == 'wordpiece':
        word = tokenizers.BertWordPieceTokenizer()
        word.train_from_iterator(texts, 600, show_progress=False)
        pieces = sorted(word.get_vocab().items(), key=lambda item: item[1])
        (folder / 'vocab.txt').write_text('\n'.join(piece for piece, _ in pieces), encoding='utf-8')
        return config
    if kind == 'tiktoken':
        pairs = tokenizers.ByteLevelBPETokenizer()
        pairs.train_from_iterator(texts, 600, show_progress=False)
        byte = {character: byte for byte, character in convert_slow_tokenizer.bytes_to_unicode().items()}
        rows = [b'%s %d' % (base64.b64encode(bytes(byte[character] for character in piece)), rank)
                for piece, rank in sorted(pairs.get_vocab().items(), key=lambda item: item[1])]
        (folder / 'vocab.tiktoken').write_bytes(b'\n'.join(rows))
        return {'name': 'ours', 'pattern': TOKENIZERS[kind].gpt2, 'ids': 0}
    return TOKENIZERS[kind].save(str(folder), '', config, lambda: [*texts, *3 * STARS])


@pytest.fixture(scope='module', params=TOKENIZERS)
def pair(request, english, tmp_path_factory):
    """(a tokenizer of ours, AutoTokenizer's of the exported folder)"""
    folder = tmp_path_factory.mktemp(request.param)
    facts = make_vocabulary(request.param, folder, english)
    ours = TOKENIZERS[request.param](str(folder), facts)
    with pytest.MonkeyPatch.context() as patch:         # some versions' manuals have a tie, others none
        patch.setattr('pydoc_data.topics.topics', {'manual': '\n'.join([*english[:100], *STARS])})
        fast, tie = prepare_data.fast_tokenizer(ours, 32)
    assert bool(tie) == (request.param == 'sentencepiece') and tie in ['', *STARS]
    fast.save_pretrained(folder / 'out')
    transformers.RoFormerConfig().save_pretrained(folder / 'out')
    return ours, transformers.AutoTokenizer.from_pretrained(folder / 'out')


def test_auto_tokenizer_gives_our_ids(pair, english):
    ours, theirs = pair
    texts = [*english, '', ' ', 'caf\u00e9 \uff26\uff55\uff4c\uff4c \u4e2d\u6587 \u03b1 \U0001f600']
    assert sum(map(len, texts)) > 100_000
    assert ours.encode(texts) == theirs(texts, add_special_tokens=False)['input_ids']
    both = list(zip(ours.encode(STARS), theirs(STARS, add_special_tokens=False)['input_ids'], strict=True))
    assert any(one != other for one, other in both) == (ours.file_name == 'sentencepiece.model')
    assert all(ours.same(one, other) and not ours.same(one, other[1:]) for one, other in both)


def test_auto_tokenizer_makes_our_rows(pair):
    ours, theirs = pair
    special, (first, second, third) = ours.special, ours.encode(['the', ' of a', 'return it'])
    found = theirs('the [MASK] of a [MASK]', 'return it')
    assert found['input_ids'] == [special['cls'], *first, special['mask'], *second, special['mask'],
                                  special['sep'], *third, special['sep']]
    assert found['token_type_ids'] == [0] * (5 + len(first + second) - 1) + [1] * (len(third) + 1)
    assert (theirs.pad_token_id, theirs.mask_token_id) == (special['pad'], special['mask'])
    assert theirs.model_max_length == 32


def megabyte(name):
    """Sentences of the first files of an archive of real texts, a million characters or more."""
    data = os.environ.get('THINBERT_DATA') or os.path.join(ROOT, '..', 'shared', 'data')
    path = os.path.join(data, f'{name}.tar.xz')
    if not os.path.exists(path):
        pytest.skip(f'{path}: not there')
    texts, size = [], 0
    with tarfile.open(path) as archive:
        for member in filter(tarfile.TarInfo.isfile, archive):
            texts.append(archive.extractfile(member).read().decode('utf-8', 'replace'))
            size += len(texts[-1])
            if size > 1_000_000:
                break
    return sentences(texts)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['en_wikipedia_articles', 'zh_classics'])
def test_auto_tokenizer_gives_our_ids_on_a_megabyte(name, pair):
    """But for sentencepiece's float32 sums: segmentations of equal score may change places."""
    (ours, theirs), texts = pair, megabyte(name)
    other = [(one, two) for one, two in zip(ours.encode(texts), theirs(texts, add_special_tokens=False)[
        'input_ids'], strict=True) if one != two]
    assert len(other) <= len(texts) / 1000 * (ours.file_name == 'sentencepiece.model')
    assert all(ours.same(one, two) for one, two in other)


# ---- load and export of runs ----

def export(path, folder):
    source.use_checkpoint('', str(folder), str(path))


@pytest.fixture(scope='module')
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs') / 'run'
    train(corpus, folder, '--max_iters=2', '--checkpoint_interval=1', '--attention=pairwise', '--pair_rank=2')
    return folder


def test_load_needs_the_run_alone(run, corpus, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / 'moved')
    content = torch.load(run / 'ckpt_0000002.pt')
    content['config']['data_dir'] = 'gone'
    torch.save(content, tmp_path / 'moved' / 'ckpt_0000002.pt')
    monkeypatch.chdir(tmp_path)
    for path in ('moved', tmp_path / 'moved' / 'ckpt_0000002.pt'):
        state = torch.get_rng_state()
        model, tokenizer = load(path)
        assert torch.equal(torch.get_rng_state(), state)
        assert type(model) is MaskedLM and not model.training and model.config.pair_rank == 2
        assert tokenizer.encode(['the parser']) == load_tokenizer(corpus).encode(['the parser'])
    shutil.rmtree(tmp_path / 'moved' / 'tokenizer')
    with pytest.raises(UserError, match='moved/ckpt_0000002.pt: no tokenizer/ in moved or gone/tiny; copy'):
        load('moved')
    content['data']['tokenizer'] = 'another'
    torch.save(content, run.parent / 'other.pt')
    shutil.copytree(run / 'tokenizer', run.parent / 'tokenizer')
    with pytest.raises(UserError, match="other.pt: the data differs: tokenizer is 'another' there"):
        load(run.parent / 'other.pt')


def test_the_python_of_the_readme(run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    with open(os.path.join(ROOT, 'README.md'), encoding='utf-8') as file:
        code, = re.findall('```python\n(.*?)```', file.read(), re.DOTALL)
    assert "'out/quickstart'" in code
    exec(code.replace("'out/quickstart'", "'run'"), {})
    similarity, word = capsys.readouterr().out.split()
    assert -1 <= float(similarity) <= 1 and word in load(run)[1].pieces


@pytest.mark.slow
@pytest.mark.parametrize('position', ['absolute', 'rope'])
def test_fill_mask_pipeline_predicts_what_ours_does(corpus, tmp_path, position):
    path = pretrained(tmp_path / 'run', corpus, attention='shared', position=position)
    model, tokenizer = load(path)
    export(path, tmp_path / 'out')
    found = transformers.pipeline('fill-mask', str(tmp_path / 'out'))('Returns the [MASK] of a file.')
    special, (before, after) = tokenizer.special, tokenizer.encode(['Returns the', ' of a file.'])
    row = torch.tensor([[special['cls'], *before, special['mask'], *after, special['sep']]])
    best = model(row)[0, 1 + len(before)].softmax(-1).topk(5)
    assert [one['token'] for one in found] == best.indices.tolist()
    assert [one['score'] for one in found] == pytest.approx(best.values.tolist(), rel=1e-4)
    encoder = transformers.AutoModel.from_pretrained(tmp_path / 'out')
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / 'out')(
        ['A parser.', 'It reads two files.'], padding=True, return_tensors='pt')
    keep = tokens['attention_mask'].bool()
    wanted = model.encoder(tokens['input_ids'], tokens['token_type_ids'], keep)
    assert (encoder(**tokens).last_hidden_state - wanted)[keep].abs().max() < 1e-4


def test_model_card(run, tmp_path):
    """Of the last checkpoint, and of an earlier one: the validation before it."""
    model, _ = load(run)
    size = sum(parameter.numel() for parameter in model.parameters())
    more = 2 * (16 * 16 + 16) - 2 * 2 * 4 * 4 * 2                       # keys in two layers; A and B
    val = {line['step']: line for line in source.read_metrics(run) if line['kind'] == 'val'}
    for step, validated in ((2, 2), (1, 0)):
        export(run / f'ckpt_000000{step}.pt', tmp_path)
        card = (tmp_path / 'README.md').read_text()
        for part in ('BertForMaskedLM', '| command | `python train.py ', '--attention=pairwise',
                     '| data | tiny |', '| training after step ', f'{size:,} |', f'{size + more:,} |',
                     f"| validation after step {validated} | loss {val[validated]['loss']:.4f}, accuracy "):
            assert part in card, card
    card = source.model_card(model, source.to_transformers(model), {
        'path': 'x.pt', 'step': 1, 'task': 'custom', 'scale': (2.5, 1.0, -9, 9)}, 'why')
    assert '| data | custom |\n| prediction | 2.5 + 1 * logit |\n' in card and '\nwhy\n' in card


def test_a_tokenizer_with_other_ids_is_left_out(run, english, corpus, tmp_path, capsys):
    """BPE of sentencepiece, which tokenizers' Unigram model does not have."""
    import sentencepiece
    shutil.copytree(run, tmp_path / 'run')
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(english), model_prefix=str(tmp_path / 'sentencepiece'), vocab_size=398,
        model_type='bpe', minloglevel=2)                                # [PAD] and [MASK] are added
    bpe = TOKENIZERS['sentencepiece'](str(tmp_path), {'kind': 'sentencepiece'})
    prepare_data.copy_tokenizer(bpe, tmp_path / 'run')
    content = torch.load(run / 'ckpt_0000002.pt')
    content['data']['tokenizer'] = prepare_data.tokenizer_identity(tmp_path / 'run')
    torch.save(content, tmp_path / 'run' / 'ckpt_0000002.pt')
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'tokenizer.json').write_text('of an earlier export')
    run_here(corpus, tmp_path / 'run', f'--export={tmp_path}/out')
    said, wrote = capsys.readouterr().out.splitlines()
    text = re.fullmatch('no tokenizer is exported: in transformers it would give other ids for (.+)', said)[1]
    assert wrote.startswith(f'wrote {tmp_path}/out') and ast.literal_eval(text)
    assert sorted(os.listdir(tmp_path / 'out')) == ['README.md', 'config.json', 'model.safetensors']
    assert said in (tmp_path / 'out' / 'README.md').read_text()
    assert type(transformers.AutoModel.from_pretrained(tmp_path / 'out')).__name__ == 'BertModel'


@pytest.mark.slow
def test_sentence_transformers_load_the_folder(run, tmp_path):
    """As the mean of the encoder's states over [CLS], the tokens and [SEP]."""
    package = pytest.importorskip('sentence_transformers')
    export(run, tmp_path)
    vectors = package.SentenceTransformer(str(tmp_path)).encode(['The parser.', 'It reads two files.'])
    model, tokenizer = load(run)
    for text, vector in zip(['The parser.', 'It reads two files.'], vectors, strict=True):
        ids = [tokenizer.special['cls'], *tokenizer.encode([text])[0], tokenizer.special['sep']]
        assert (model.encoder(torch.tensor([ids]))[0].mean(0) - torch.tensor(vector)).abs().max() < 1e-4


# ---- trials ----

@pytest.fixture(scope='module')
def trials(run, tmp_path_factory):
    """out_dir of trials of sst2 and squad1."""
    folder = tmp_path_factory.mktemp('trials')
    done = stage('finetune.py', *QUICK, f'--init_from={run}', '--tasks=sst2,squad1', '--epochs=1',
                 published(folder, 'sst2', 'squad1'), f'--out_dir={folder}/out', '--trials=1')
    assert done.returncode == 0, done.stderr
    return folder / 'out'


def test_load_of_a_trial(trials, corpus):
    model, tokenizer = load(folder_of(trials, 'sst2'))
    assert type(model) is SequenceClassifier and not model.training
    assert tokenizer.encode(['the parser']) == load_tokenizer(corpus).encode(['the parser'])
    assert type(load(folder_of(trials, 'squad1'))[0]) is SpanClassifier


@pytest.mark.slow
def test_text_classification_pipeline(trials, tmp_path):
    trial = folder_of(trials, 'sst2')
    export(trial, tmp_path)
    found, = transformers.pipeline('text-classification', str(tmp_path))(['a fine film'])
    (model, tokenizer), special = load(trial), prepare_data.load_tokenizer(trial).special
    chances = model(torch.tensor([[special['cls'], *tokenizer.encode(['a fine film'])[0], special['sep']]]))
    best = chances.softmax(-1)[0].max(-1)
    assert found['label'] == TASKS['sst2'].labels[best.indices]
    assert found['score'] == pytest.approx(best.values.item(), rel=1e-4)
    card = (tmp_path / 'README.md').read_text()
    for part in ('| data | sst2 |', '| command | `python finetune.py ', '| training after', '| accuracy '):
        assert part in card, card


def test_question_answering_has_our_logits(trials, tmp_path):
    trial = folder_of(trials, 'squad1')
    export(trial, tmp_path)
    theirs = transformers.AutoModelForQuestionAnswering.from_pretrained(tmp_path)
    row = transformers.AutoTokenizer.from_pretrained(tmp_path)('who?', 'the parser', return_tensors='pt')
    ours, _ = load(trial)
    start, end = ours(row['input_ids'], row['token_type_ids'])
    found = theirs(**row)
    assert (found.start_logits - start).abs().max() < 1e-4 and (found.end_logits - end).abs().max() < 1e-4


def test_a_trial_has_no_masks_to_fill_in(trials):
    with pytest.raises(UserError, match='is fine-tuned: it has no LM head'):
        source.use_checkpoint('a [MASK]', '', folder_of(trials, 'sst2'))
