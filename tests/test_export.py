"""Folders for transformers and sentence-transformers, load(), and runs that start from a BERT."""
import json
import os
import re

import numpy as np
import pytest
import torch
from conftest import refused, tiny

import train
from model import EncoderConfig, MaskedLM, SequenceClassifier
from prepare_data import TOKENIZERS, copy_tokenizer, fast_tokenizer, load_meta, load_tokenizer

transformers = pytest.importorskip('transformers')
SHAPE = {'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32, 'block_size': 32, 'dropout': 0.0}


def make_run(folder, corpus, kind=MaskedLM, content=None, **fields):
    """A run of random weights, or a trial, as train.py and finetune.py write them -> folder as a str

    content  more entries of the checkpoint
    """
    more = content if content else {}
    torch.manual_seed(1)
    meta = load_meta(corpus)
    model = kind(EncoderConfig(meta['vocab_size'], **{**SHAPE, **fields}))
    content = {'model': model.state_dict(), 'model_config': vars(model.config), 'data': meta['identity'],
               'config': {'objective': 'mlm', 'dataset': 'tiny'}, 'step': 1, 'samples': 8}
    name = 'ckpt_0000001.pt'
    if kind is SequenceClassifier:
        content = {**content, 'head': 'classify', 'task': 'sst2', 'config': {}}
        name = 'model.pt'
    content = {**content, **more}
    folder.mkdir(parents=True)
    copy_tokenizer(load_tokenizer(corpus), str(folder))
    train.write_checkpoint(str(folder / name), content)
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
    done = stage('train', f'--out_dir={run}', f'--export={tmp_path}/out')
    assert done.code == 0, done
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


def test_the_folder_has_a_card_and_our_tokenizer(exported):
    _, _, folder = exported
    assert (folder / 'sentencepiece.model').exists()
    card = (folder / 'README.md').read_text()
    assert "attention='shared'" in card
    assert 'Trained on tiny' in card


@pytest.mark.slow
def test_sentence_transformers_open_the_folder(exported):
    """As the mean of the states over [CLS], the tokens and [SEP]."""
    package = pytest.importorskip('sentence_transformers')
    model, tokenizer, folder = exported
    texts = ['The parser.', 'It reads two files.']
    for text, vector in zip(texts, package.SentenceTransformer(str(folder)).encode(texts), strict=True):
        states = model.encoder(row_of(tokenizer, text)[0])[0]
        assert (states.mean(0) - torch.tensor(vector)).abs().max() < 1e-4


def test_a_trial_is_loaded_and_exported(corpus, tmp_path, stage):
    trial = make_run(tmp_path / 'sst2_1', corpus, SequenceClassifier, n_label=3)
    model, tokenizer, _ = train.load(trial)
    assert not model.training
    assert stage('train', f'--init_from={trial}', f'--export={tmp_path}/out').code == 0
    twin = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'out').eval()
    ids, _ = row_of(tokenizer, 'the parser')
    assert (twin(ids).logits - model(ids)).abs().max() < 1e-4
    assert 'sst2' in (tmp_path / 'out' / 'README.md').read_text()


def test_a_run_starts_from_a_bert(corpus, tmp_path, stage):
    """The exported weights come back; a BERT of another size, and no BERT, are refused in one line."""
    run = make_run(tmp_path / 'run', corpus)
    assert stage('train', f'--init_from={run}', f'--export={tmp_path}/bert').code == 0
    done = stage('train', *tiny(corpus, tmp_path / 'a', init_from=tmp_path / 'bert', max_iters=1,
                                learning_rate=0))
    assert done.code == 0
    assert 'from step 0 of the weights of' in done.out
    before = train.load(run)[0].state_dict()
    after = train.load(str(tmp_path / 'a'))[0].state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    done = stage('train', *tiny(corpus, tmp_path / 'b', init_from=tmp_path / 'bert', n_layer=3))
    assert done.code == 2
    assert done.err.splitlines()[-1].endswith('has n_layer=2, this run has 3')


def test_what_is_refused_writes_nothing(corpus, tmp_path, stage, monkeypatch):
    """A position that no BERT has; a tokenizer that transformers cannot hold."""
    run = make_run(tmp_path / 'rab', corpus, position='rab')
    assert 'no equal' in refused(stage('train', f'--init_from={run}', f'--export={tmp_path}/out'))
    run = make_run(tmp_path / 'run', corpus)
    monkeypatch.delattr(TOKENIZERS['sentencepiece'], 'as_library')
    assert 'are exported' in refused(stage('train', f'--init_from={run}', f'--export={tmp_path}/out'))
    assert not (tmp_path / 'out').exists()


def test_a_folder_that_is_not_empty_is_refused(corpus, tmp_path, stage):
    source = make_run(tmp_path / 'run', corpus)
    (tmp_path / 'out').mkdir()
    export = 'train', f'--init_from={source}', f'--export={tmp_path}/out'
    assert stage(*export).code == 0
    assert 'out: it is not empty: choose another folder' in refused(stage(*export))


def test_a_trial_fills_no_masks(corpus, tmp_path, stage):
    source = make_run(tmp_path / 'sst2_1', corpus, SequenceClassifier, n_label=3)
    line = refused(stage('train', f'--init_from={source}', '--fill=a [MASK]'))
    assert 'was fine-tuned and predicts no words' in line


def test_labels_and_scale_of_a_trial_are_exported(corpus, tmp_path, stage):
    """As transformers' own: names of classes, and numbers in place of standardised ones."""
    source = make_run(tmp_path / 'a_1', corpus, SequenceClassifier, n_label=2,
                      content={'labels': ('bad', 'good'), 'scale': (0.0, 1.0)})
    assert stage('train', f'--init_from={source}', f'--export={tmp_path}/a').code == 0
    twin = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'a')
    assert twin.config.id2label == {0: 'bad', 1: 'good'}

    source = make_run(tmp_path / 'b_1', corpus, SequenceClassifier, n_label=1,
                      content={'head': 'regress', 'labels': (), 'scale': (240.0, 2.5)})
    model, tokenizer, _ = train.load(source)
    assert stage('train', f'--init_from={source}', f'--export={tmp_path}/b').code == 0
    twin = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / 'b').eval()
    ids, _ = row_of(tokenizer, 'the parser')
    assert (twin(ids).logits - (240.0 + 2.5 * model(ids))).abs().max() < 1e-3
    assert twin.config.problem_type == 'regression'


def test_the_exported_tokenizer_gives_our_ids_but_for_ties(corpus):
    """Of sentences and lines: over thousands of tokens sentencepiece's float32 sums lose digits."""
    with open(os.path.join(corpus, 'docstrings.jsonl'), encoding='utf-8') as file:
        pieces = [re.split(r'(?<=[.!?])\s+|\n', json.loads(line)['text']) for line in file]
    texts = ['', ' '] + [part for parts in pieces for part in parts if part.strip()]
    assert sum(map(len, texts)) > 100_000
    tokenizer = load_tokenizer(corpus)
    ours = tokenizer.encode(texts)
    exported = fast_tokenizer(tokenizer, 32)(texts, add_special_tokens=False)['input_ids']
    ties = [(one, two) for one, two in zip(ours, exported, strict=True) if one != two]
    scores = np.array([tokenizer.model.get_score(i) for i in range(len(tokenizer.model))])
    for one, two in ties:
        assert scores[one].sum() == pytest.approx(scores[two].sum(), abs=1e-3)
    assert len(ties) < 0.002 * len(texts)
