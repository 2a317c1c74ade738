"""finetune.py: rows and windows, heads against Hugging Face, trials that repeat, every row of TASKS.

Metrics: test_metrics.py. Readers and submissions: test_tasks.py. The report: test_report.py.
"""
import gc
import glob
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import weakref
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, refused, seen, stage, terminal, torchrun
from published import HANZI, publish

import finetune
import train
from configurator import UserError, configure
from finetune import HEADS, TASKS, Example, Feature, collate, join_texts, training_batch
from model import (
    ALLOWED_POSITIONS,
    ATTENTION,
    POOLING,
    EncoderConfig,
    MaskedLM,
    PermutationLM,
    SequenceClassifier,
)
from prepare_data import load_meta, load_tokenizer

CPU = train.Runtime(torch.device('cpu'))
SPECIAL = {'pad': 0, 'unk': 1, 'cls': 2, 'sep': 3, 'mask': 4}
SHAPE = {'block_size': 48, 'n_layer': 2, 'n_head': 4, 'n_embd': 16, 'n_inner': 32}
QUICK = ['--trials=1', '--epochs=2', '--total_batch=8', '--batch_size=8', '--learning_rate=5e-3',
         '--stride=16', '--log_interval=1000', '--device=cpu', '--dtype=float32']
PLAIN = ['--dropout=0', '--attention_dropout=0', '--adam_eps=1',
         '--learning_rate=0.1']     # steps as of plain descent
CHINESE = {'afqmc', 'tnews', 'iflytek', 'csl', 'wsc', 'cmnli', 'ocnli', 'cmrc', 'chid', 'c3'}


# ---- fixtures ----

@pytest.fixture(scope='session')
def tokenizers(corpus, tmp_path_factory):
    """Prepared folders: {'sentencepiece': English, 'character': Chinese}."""
    folder = tmp_path_factory.mktemp('chinese')
    rows = [''.join(chr(0x4e00 + (i * 7 + j * j) % 900) for j in range(60)) + HANZI for i in range(90)]
    (folder / 'text.jsonl').write_text(''.join(json.dumps({'text': row}) + '\n' for row in rows))
    done = stage('prepare_data.py', f'--corpus={folder}/text.jsonl', '--tokenizer=character', '--name=zh',
                 '--num_proc=1', f'--data_dir={folder}', '--vocab_size=1500', '--val_fraction=0.1')
    assert done.returncode == 0, done.stderr
    return {'sentencepiece': corpus, 'character': str(folder / 'zh')}


def pretrained(folder, tokenizer, step=3, seed=0, milestones=(), **changes):
    """Write a checkpoint as train.py does, of random weights; returns the run folder."""
    meta = load_meta(tokenizer)
    torch.manual_seed(seed)
    model = MaskedLM(EncoderConfig(meta['vocab_size'], **{**SHAPE, **changes}))
    data_dir, dataset = os.path.split(tokenizer)
    os.makedirs(folder, exist_ok=True)
    train.write_checkpoint(os.path.join(folder, train.checkpoint_name(step)), {
        'step': step, 'model': model.state_dict(), 'config': {'objective': 'mlm', 'data_dir': data_dir,
                                                              'dataset': dataset, 'seed': seed,
                                                              'milestones': milestones},
        'model_config': asdict(model.config), 'data': {**meta['identity'], 'vocab_size': meta['vocab_size']}})
    return str(folder)


@pytest.fixture(scope='session')
def run(tokenizers, tmp_path_factory):
    return pretrained(tmp_path_factory.mktemp('english') / 'run', tokenizers['sentencepiece'])


@pytest.fixture(scope='session')
def chinese_run(tokenizers, tmp_path_factory):
    return pretrained(tmp_path_factory.mktemp('chinese_run') / 'run', tokenizers['character'])


@pytest.fixture
def finetune_here(monkeypatch):
    """main() of finetune.py in this process: (*arguments) -> trials of results.json of --out_dir."""
    before = dict(vars(finetune))

    def call(*arguments):
        vars(finetune).update({key: before[key] for key in configure(dict(before), [])[0]})
        monkeypatch.setattr(sys, 'argv', ['finetune.py', *QUICK, *arguments])
        finetune.main()
        folder = next(word[len('--out_dir='):] for word in arguments if word.startswith('--out_dir='))
        with open(os.path.join(folder, 'results.json')) as file:
            return json.load(file)['trials']

    yield call
    vars(finetune).update({key: before[key] for key in configure(dict(before), [])[0]})


def folder_of(out, name):
    """The one folder of a trial, as in cola_1."""
    found, = glob.glob(f'{out}/*/{name}_*')
    return found


def published(tmp_path, *names, **sizes):
    for name in names:
        publish(name, tmp_path / 'labelled', **sizes)
    return f'--data_dir={tmp_path}/labelled'


def stand_in(head, **changes):
    """What run_head reads of a trial."""
    return SimpleNamespace(head=head, knobs=settings(**changes),
                           form=lambda runtime: (SPECIAL, head.choices, 0))


def settings(**changes):
    return SimpleNamespace(**{'block_size': 48, 'stride': 16, 'max_answer': 30, 'null_threshold': 0.0,
                              'pad_to_block': False, 'batch_size': 8, 'unanswerable': False, 'dropout': 0.0,
                              'attention_dropout': 0.0, 'pooling': 'cls', **changes})


# ---- rows ----

def test_pairs_are_joined_and_cut_as_in_bert(tmp_path):
    """Token by token from the longer, b at a tie; Hugging Face gives the odd token to the longer text
    instead."""
    transformers = pytest.importorskip('transformers')
    words = [f'w{i}' for i in range(60)]
    (tmp_path / 'vocab.txt').write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *words]))
    theirs = transformers.BertTokenizer.from_pretrained(str(tmp_path))
    compared = 0
    for n, m, size in itertools.product((1, 2, 7, 12, 30), (None, 1, 5, 11, 30), (8, 9, 16, 25)):
        a, b = words[:n], None if m is None else words[30:30 + m]
        ids = [[words.index(word) + 5 for word in text] for text in (a, b or ())]
        row, first = join_texts(SPECIAL, size, ids[0], ids[1] if b else None)
        while sum(map(len, ids)) > size - 2 - (m is not None):
            ids[len(ids[0]) <= len(ids[1])].pop()
        assert row.tolist() == [2, *ids[0], 3, *(ids[1] + [3] if b else ())], (n, m, size)
        assert first == len(ids[0]) + 2
        if min(len(ids[0]) - n, len(ids[1]) - (m or 0)) == 0 or size % 2:
            wanted = theirs(' '.join(a), b and ' '.join(b), truncation='longest_first', max_length=size)
            assert row.tolist() == wanted['input_ids'], (n, m, size)
            assert [int(i >= first) for i in range(len(row))] == wanted['token_type_ids']
            compared += 1
    assert compared > 60


@pytest.mark.parametrize('kind', ['sentencepiece', 'character'])
def test_windows_hold_every_token_and_the_answer(tokenizers, kind):
    """Each context token is in a window, and the span that the target names is the answer's text."""
    tokenizer = load_tokenizer(tokenizers[kind])
    if kind == 'character':
        context = ''.join(chr(0x4e00 + (i * i) % 700) for i in range(150)) + '，1998年 ok。'
        answers = [context[i:i + n] for i, n in ((0, 1), (3, 5), (70, 20), (150, 6), (len(context) - 1, 1))]
    else:
        context = 'The  parser reads café messages (RFC 2822) from files. ' * 6 + 'It ends in 1998, at last'
        answers = ['The', 'café', 'RFC 2822', 'reads café messages', '1998', 'last']
    examples = [Example(i, ('what ?', context), ((answer, context.index(answer)),))
                for i, answer in enumerate(answers)]
    features = finetune.span_features(examples, tokenizer, 48, 16)
    n_tokens = len(tokenizer.encode([context])[0])
    for i, answer in enumerate(answers):
        own = [feature for feature in features if feature.example == i]
        assert len(own) > 2 and {tuple(pair) for f in own for pair in f.offsets.tolist()} >= {
            tuple(pair) for pair in tokenizer.encode_offsets([context])[0][1].tolist()}
        assert sum(len(f.offsets) for f in own) >= n_tokens
        assert all(len(f.rows[0][0]) <= 48 for f in own)
        hits = [f for f in own if f.target != (0, 0)]
        assert hits
        for f in hits:
            begin, end = f.offsets[f.target[0] - f.first][0], f.offsets[f.target[1] - f.first][1]
            assert answer in context[begin:end] and len(context[begin:end].strip()) <= len(answer) + 1


def test_an_unanswerable_question_points_at_cls():
    assert finetune.span_target((), np.array([[0, 3]]), 5) == (0, 0)
    assert finetune.span_target((('abc', 0),), np.array([[0, 3]]), 5) == (5, 5)
    assert finetune.span_target((('abcd', 2),), np.array([[0, 3], [3, 5]]), 5) == (0, 0)      # cut off


def test_choices_are_padded_with_copies_that_count_for_nothing():
    features = [Feature(0, [(np.array([2, 5, 3]), 3)], (0, 1)),
                Feature(1, [(np.array([2, 6, 3]), 3), (np.array([2, 7, 8, 3]), 4)], (1, 2))]
    batch = collate(features, SPECIAL, True)
    assert batch['ids'].shape == (2, 2, 4) and batch['ids'][0, 1].tolist() == [2, 5, 3, 0]
    logits = torch.tensor([[1.0, 50.0], [1.0, 2.0]])
    losses = HEADS['choose'].losses(logits, torch.from_numpy(batch['targets']), None)
    assert losses[0] == 0 and losses[1] == F.cross_entropy(logits[1:], torch.tensor([1]))
    assert [len(row) for row in HEADS['choose'].outputs(logits, features, settings())] == [1, 2]
    assert collate(features, SPECIAL, True, 10)['ids'].shape == (2, 2, 10)


def test_best_span_is_that_of_all_pairs():
    generator = torch.Generator().manual_seed(1)
    for longest in (1, 3, 30):
        start, end = (torch.randn(5, 12, generator=generator) for _ in range(2))
        start[:, 9:] = end[:, 9:] = -torch.inf
        scores, first, last = finetune.best_spans(start, end, longest)
        for row in range(5):
            pairs = {(i, j): (start[row, i] + end[row, j]).item()
                     for i in range(9) for j in range(i, min(9, i + longest))}
            best = max(pairs, key=pairs.get)
            assert (first[row].item(), last[row].item()) == best and scores[row].item() == pairs[best]


def test_windows_are_joined_by_their_scores_and_the_least_score_of_no_answer():
    examples = [Example(0, ('q', 'one two three'), (('two', 4),)), Example(1, ('q', 'x'), ())]
    offsets = np.array([[0, 3], [3, 7], [7, 13]])
    features = [Feature(0, [], (0, 0), 2, offsets[:2]), Feature(0, [], (0, 0), 2, offsets[1:]),
                Feature(1, [], (0, 0), 2, np.array([[0, 1]]))]
    outputs = [(9.0, 4.0, 2, 3), (3.0, 6.0, 2, 2), (5.0, 1.0, 2, 2)]
    for knobs, texts in ((settings(), ['two', 'x']), (settings(unanswerable=True), ['two', '']),
                         (settings(unanswerable=True, null_threshold=3.9), ['two', '']),
                         (settings(unanswerable=True, null_threshold=4.0), ['two', 'x'])):
        assert HEADS['span'].predictions(examples, features, outputs, knobs) == texts


# ---- batches ----

@pytest.mark.parametrize('n, total', [(10, 4), (3, 8), (8, 4)])
def test_an_epoch_has_every_example_once(n, total):
    features = [Feature(i, [(np.array([2, 5 + i, 3]), 3)], i) for i in range(n)]
    per_epoch, orders = -(-n // total), []

    def make(step, seed=7):
        return training_batch(step, features, seed, total, (SPECIAL,))

    for epoch in range(3):
        parts = [make(epoch * per_epoch + i) for i in range(per_epoch)]
        assert {len(part['targets']) for part in parts} == {total}
        orders.append([i for part in parts
                       for i, w in zip(part['targets'], part['weights'], strict=True) if w])
        assert sorted(orders[-1]) == list(range(n))
    assert all(np.array_equal(make(1)[key], value) for key, value in make(1).items())
    other = make(0, 8)['targets'].tolist()
    assert n < 8 or (other != orders[0][:total] and orders[0] != orders[1])


# ---- Hugging Face ----

@pytest.fixture(scope='session')
def bert(tmp_path_factory):
    """A BERT with a vocabulary, saved by transformers with the head of a classifier and of question
    answering."""
    transformers = pytest.importorskip('transformers')
    folder, words = tmp_path_factory.mktemp('bert'), [f'w{i}' for i in range(60)]
    config = transformers.BertConfig(vocab_size=65, hidden_size=16, num_hidden_layers=2,
                                     num_attention_heads=4, intermediate_size=32, max_position_embeddings=48,
                                     num_labels=3)
    models = {}
    for kind in ('BertForSequenceClassification', 'BertForQuestionAnswering', 'BertForMaskedLM'):
        torch.manual_seed(3)
        config.num_labels = 2 if kind == 'BertForQuestionAnswering' else 3
        models[kind] = getattr(transformers, kind)(config).eval()
        with torch.no_grad():
            for parameter in models[kind].parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        models[kind].save_pretrained(folder / kind)
        (folder / kind / 'vocab.txt').write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]',
                                                            *words]))
    return folder, models


@pytest.mark.parametrize('kind, name', [('BertForSequenceClassification', 'mnli'),
                                        ('BertForQuestionAnswering', 'squad1')])
def test_a_hugging_face_bert_gives_its_own_logits(bert, kind, name):
    """Encoder and pooler come from the folder; only the new classifier is copied by hand."""
    folder, models = bert
    start = finetune.read_start(str(folder / kind), '', True)
    head, theirs = HEADS[TASKS[name].head], models[kind]
    ours = finetune.make_classifier(start, head, settings(), 3).eval()
    last = theirs.classifier if name == 'mnli' else theirs.qa_outputs
    ours.classifier.load_state_dict(last.state_dict())
    label = 2 if name == 'mnli' else (('w45 w46', 4),)
    examples = [Example(i, (' '.join(f'w{j}' for j in range(i, 20)),
                            ' '.join(f'w{j}' for j in range(44, 50 + i))), label) for i in range(5)]
    features = head.features(examples, start.tokenizer, 48, 16)
    outputs = finetune.run_head(ours, features, stand_in(head), CPU)
    encoded = [torch.from_numpy(np.concatenate([f.rows[0][0]]).astype(np.int64))[None] for f in features]
    types = [(torch.arange(x.size(1)) >= f.rows[0][1]).long()[None]
             for x, f in zip(encoded, features, strict=True)]
    with torch.no_grad():
        for x, kinds, output, f in zip(encoded, types, outputs, features, strict=True):
            wanted = theirs(input_ids=x, token_type_ids=kinds)
            if name == 'mnli':
                assert np.abs(np.array(output) - wanted.logits[0].numpy()).max() < 1e-5
            else:
                none, score, first, last = output
                start_logits, end_logits = wanted.start_logits[0], wanted.end_logits[0]
                assert abs(none - (start_logits[0] + end_logits[0]).item()) < 1e-5
                assert abs(score - (start_logits[first] + end_logits[last]).item()) < 1e-5
                assert f.first <= first <= last < x.size(1) - 1
                losses = head.losses(ours.eval()(x, kinds), torch.tensor([f.target]),
                                     torch.ones_like(x, dtype=torch.bool))
                loss = theirs(input_ids=x, token_type_ids=kinds, start_positions=torch.tensor([f.target[0]]),
                              end_positions=torch.tensor([f.target[1]])).loss
                assert abs(losses.item() - loss.item()) < 1e-5


def test_a_bert_without_a_pooler_gets_a_new_one(bert):
    folder, models = bert
    start = finetune.read_start(str(folder / 'BertForMaskedLM'), '', True)
    assert not any(key.startswith('pooler.') for key in start.weights)
    assert any(key.startswith('pooler.') for key in
               finetune.read_start(str(folder / 'BertForSequenceClassification'), '', True).weights)
    model = finetune.make_classifier(start, HEADS['classify'], settings(), 2)
    assert isinstance(model, SequenceClassifier)
    assert torch.equal(model.encoder.token.weight,
                       models['BertForMaskedLM'].bert.embeddings.word_embeddings.weight)


# ---- every system, every head ----

@pytest.mark.parametrize('pooling', POOLING)
@pytest.mark.parametrize('attention', ATTENTION)
def test_any_pretrained_encoder_takes_any_head(attention, pooling):
    """The encoder's states are those of pretraining, at its length and, on short rows, beyond it."""
    position = ALLOWED_POSITIONS.get(attention, ('absolute',))[0]
    config = EncoderConfig(40, 16, 2, 4, 16, 32, attention=attention, position=position)
    torch.manual_seed(1)
    model = (PermutationLM if attention == 'xlnet' else MaskedLM)(config).eval()
    start = finetune.Start(config, model.state_dict(), None, {})
    ids = torch.randint(5, 40, (2, 9))
    for head, length in itertools.product(HEADS.values(), (16, 32)):
        knobs = settings(block_size=length, pooling=pooling)
        ours = finetune.make_classifier(start, head, knobs, 3).eval()
        assert torch.allclose(ours.encoder(ids), model.encoder(ids), atol=1e-5)
        rows = ids[:, None].expand(-1, 3, -1) if head is HEADS['choose'] else ids
        logits = ours(rows)
        assert torch.isfinite(torch.stack(logits) if head is HEADS['span'] else logits).all()
        assert ours.config.block_size == length


@pytest.mark.slow
@pytest.mark.parametrize('name', HEADS)
def test_losses_compile_in_one_graph(name):
    config = EncoderConfig(40, 16, 2, 4, 16, 32, dropout=0.0, attention_dropout=0.0, n_label=3)
    model = HEADS[name].model(config)
    learner = finetune.Learner(model, HEADS[name].losses)
    row = np.array([2, 7, 8, 3, 9, 3]), 4
    targets = {'classify': (2, 1), 'regress': (0.5, 1.0), 'span': ((1, 2), (0, 0)),
               'choose': ((0, 1), (1, 2))}[name]
    features = [Feature(i, [row] * (targets[i][1] if name == 'choose' else 1), targets[i], 1,
                        np.zeros((3, 2)) if name == 'span' else None) for i in range(2)]
    batch = collate(features, SPECIAL, HEADS[name].choices, 8)
    part = {key: torch.from_numpy(value) for key, value in batch.items()}
    compiled = torch.compile(learner, backend='eager', fullgraph=True)
    assert torch.allclose(compiled(**part), learner(**part), atol=1e-6)
    assert learner(**part).shape == (2,) and learner(**part).dtype == torch.float32


# ---- every row of TASKS ----

LIKE_ANOTHER = {'sst2', 'qqp', 'qnli', 'rte', 'wnli', 'squad1', 'boolq', 'csl', 'iflytek', 'tnews', 'ocnli'}


@pytest.mark.parametrize('name', [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_ANOTHER))
                                  for name in TASKS if TASKS[name].hub])
def test_every_task_from_its_files_to_its_submission(name, run, chinese_run, tmp_path, finetune_here):
    """Files as they are published -> training, scores, predictions, submission."""
    files = published(tmp_path, name, n_train=12, n_dev=8)
    knobs = ['--predict=test'] if any(split.startswith('test') for split in TASKS[name].files) else []
    trial, = finetune_here(f"--init_from={chinese_run if name in CHINESE else run}", f'--tasks={name}', files,
                           f'--out_dir={tmp_path}/out', '--epochs=1', *knobs)
    assert set(trial['scores'][name]) >= set(TASKS[name].metrics)
    assert trial['metric'] == TASKS[name].metrics[0]
    assert all(-1 <= value <= 1 for forms in trial['scores'].values() for value in forms.values())
    assert list(trial['scores']) == list(trial['majority']) == list(trial['n_dev'])
    assert ('mnli_mm' in trial['scores']) == (name == 'mnli')
    folder = folder_of(tmp_path / 'out', f'{name}_1')
    with open(os.path.join(folder, 'predictions.jsonl')) as file:
        lines = [json.loads(line) for line in file]
    for column, n in trial['n_dev'].items():
        ids = [str(line['id']) for line in lines if line['column'] == column]
        assert len(ids) == n == len(set(ids)) > 1
    if knobs:
        for part in TASKS[name].submission.split('|'):
            assert os.path.getsize(os.path.join(folder, part)) > 20


SLOWER = [pytest.param(name, marks=pytest.mark.slow) for name in ('mrpc', 'stsb', 'squad1', 'c3', 'cmrc')]


@pytest.mark.parametrize('name', ['sst2', *SLOWER])
def test_every_head_learns(name, run, chinese_run, tmp_path, finetune_here):
    """Trained and evaluated on the same few examples, each head passes its majority baseline by far."""
    files = published(tmp_path, name, n_train=16, n_dev=16)
    for path in glob.glob(f'{tmp_path}/labelled/**/*dev*', recursive=True):
        twin = path.replace('dev', 'train')
        os.replace(twin, path)
        os.link(path, twin)
    trial, = finetune_here(f"--init_from={chinese_run if name in CHINESE else run}", f'--tasks={name}', files,
                           f'--out_dir={tmp_path}/out', '--epochs=50', '--dropout=0', '--attention_dropout=0')
    score, majority = (trial[kind][name][trial['metric']] for kind in ('scores', 'majority'))
    assert score > 0.8 and score > majority + 0.15, (score, majority)


# ---- trials ----

def weights(folder):
    return train.read_checkpoint(glob.glob(os.path.join(folder, '*', '*', 'model.pt'))[0])['model']


@pytest.mark.parametrize('knobs', [[], ['--keep_best=true', '--eval_interval=2', '--pooling=layerwise']])
def test_a_trial_that_was_cut_off_ends_as_an_undisturbed_one(run, tmp_path, finetune_here, monkeypatch,
                                                             knobs):
    files = published(tmp_path, 'mrpc')
    arguments = [f'--init_from={run}', '--tasks=mrpc', files, *knobs]
    whole, = finetune_here(*arguments, f'--out_dir={tmp_path}/whole')
    validate, calls = finetune.validate, []

    def die(*details):
        calls.append(details)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return validate(*details)

    monkeypatch.setattr(finetune, 'validate', die)
    with pytest.raises(KeyboardInterrupt):
        finetune_here(*arguments, f'--out_dir={tmp_path}/cut')
    assert not glob.glob(f'{tmp_path}/cut/*/*/result.json')
    again, = finetune_here(*arguments, f'--out_dir={tmp_path}/cut')
    one, other = weights(tmp_path / 'whole'), weights(tmp_path / 'cut')
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert (whole['scores'], whole['best_step']) == (again['scores'], again['best_step'])


def test_an_interrupt_keeps_finished_trials(run, tmp_path, finetune_here, monkeypatch, capsys):
    """The trial under way is lost; the same command trains it and no other."""
    arguments = [f'--init_from={run}', '--tasks=cola', published(tmp_path, 'cola'),
                 f'--out_dir={tmp_path}/out', '--trials=2']
    update, steps = train.update, []

    def interrupted(*details):
        steps.append(details)
        if len(steps) == 8:                             # of 12, two trials of 6
            signal.raise_signal(signal.SIGINT)
        return update(*details)

    monkeypatch.setattr(train, 'update', interrupted)
    with pytest.raises(KeyboardInterrupt):
        finetune_here(*arguments)
    assert [os.path.basename(os.path.dirname(path))[:6] for path in glob.glob(
        f'{tmp_path}/out/*/*/result.json')] == ['cola_1']
    trials = finetune_here(*arguments)
    assert [trial['seed'] for trial in trials] == [1, 2] and len(steps) == 8 + 6
    assert '2 trials, 1 of them finished before' in capsys.readouterr().out


def test_half_precision(run, tmp_path, finetune_here):
    files = published(tmp_path, 'rte', 'squad2', n_train=8, n_dev=4)
    for dtype in ('bfloat16', 'float16'):
        trials = finetune_here(f'--init_from={run}', '--tasks=rte,squad2', files,
                               f'--out_dir={tmp_path}/{dtype}', f'--dtype={dtype}')
        assert [trial['recipe']['dtype'] for trial in trials] == [dtype] * 2


def test_a_finished_trial_is_not_repeated(run, tmp_path, finetune_here, capsys):
    arguments = [f'--init_from={run}', '--tasks=cola,rte', published(tmp_path, 'cola', 'rte'),
                 f'--out_dir={tmp_path}/out']
    finetune_here(*arguments)
    path = os.path.join(folder_of(tmp_path / 'out', 'cola_1'), 'result.json')
    before = os.stat(path).st_mtime_ns
    trials = finetune_here(*arguments, '--trials=2')
    assert os.stat(path).st_mtime_ns == before and len(trials) == 4
    assert '4 trials, 2 of them finished before' in capsys.readouterr().out


def test_trials_of_other_recipes_data_or_weights_are_others(run, tokenizers, tmp_path, finetune_here, capsys):
    """Each has a folder and a row of its own; the same files in another folder are the same data."""
    files = published(tmp_path, 'cola')
    plain = [f'--init_from={run}', '--tasks=cola', f'--out_dir={tmp_path}/out', '--epochs=1']
    first, = finetune_here(*plain, files)
    os.rename(tmp_path / 'labelled', tmp_path / 'moved')
    moved = f'--data_dir={tmp_path}/moved'
    assert finetune_here(*plain, moved) == [first]
    capsys.readouterr()
    assert len(finetune_here(*plain, moved, '--learning_rate=0.01')) == 2
    out = capsys.readouterr().out
    assert 'ours: run learning_rate=0.005' in out and 'ours: run learning_rate=0.01' in out
    publish('cola', tmp_path / 'more', n_train=60)
    trials = finetune_here(*plain, f'--data_dir={tmp_path}/more')
    assert len(trials) == 3 and len({trial['data']['train'] for trial in trials}) == 2
    other = pretrained(tmp_path / 'run', tokenizers['sentencepiece'], seed=5)
    trials = finetune_here(f'--init_from={other}', *plain[1:], moved)
    assert len(trials) == 4 and len({trial['weights'] for trial in trials}) == 2
    assert len(set(map(finetune.row_names(trials).count, finetune.row_names(trials)))) == 1     # all differ
    assert re.search(r'run learning_rate=0.005 [0-9a-f]{6} [0-9a-f]{6}\b', capsys.readouterr().out)


def test_report_alone_shows_every_finished_trial(run, tmp_path, finetune_here, monkeypatch, capsys):
    files, out = published(tmp_path, 'cola', 'rte'), f'--out_dir={tmp_path}/out'
    finetune_here(f'--init_from={run}', '--tasks=cola', files, out, '--epochs=1')
    trials = finetune_here(f'--init_from={run}', '--tasks=rte', files, out, '--epochs=1')
    assert [trial['task'] for trial in trials] == ['cola', 'rte']
    page = (tmp_path / 'out' / 'results.md').read_text()
    os.remove(tmp_path / 'out' / 'results.md')
    os.remove(tmp_path / 'out' / 'results.json')
    monkeypatch.setattr(train, 'update', None)
    capsys.readouterr()
    assert finetune_here('--report=true', out, '--init_from=gone', '--data_dir=gone') == trials
    assert (tmp_path / 'out' / 'results.md').read_text().split('\n', 1)[1] == page.split('\n', 1)[1]
    assert '| ours: run |' in capsys.readouterr().out
    with pytest.raises(UserError, match='no trial has finished'):
        finetune_here('--report=true', f'--out_dir={tmp_path}/none')


# ---- where weights come from ----

def test_a_glob_of_folders_is_one_system_and_one_of_checkpoints_a_curve(tokenizers, tmp_path, capsys):
    """Milestones alone, if the run has some: not what train.py keeps for resuming.  Commas join all kinds."""
    english, chinese = tokenizers['sentencepiece'], tokenizers['character']
    for seed in (7, 4):
        for step in (1, 3):
            pretrained(tmp_path / f'pair-{seed}', english, step, seed, (1,))
    for step in (2, 4, 5):
        pretrained(tmp_path / 'plain', chinese, step, 1)
    (tmp_path / 'pair-7.log').write_text('')

    def told(init_from, compare=''):
        return [(source.init, source.step, source.run, source.run_seed) for source in finetune.find_sources(
            init_from, compare)]

    seeds = [('pair', 3, 'pair-4', 4), ('pair', 3, 'pair-7', 7)]
    assert told(f'{tmp_path}/pair-*') == told(f'{tmp_path}/pair-[4,7]') == seeds
    curve = [('plain', step, 'plain', None) for step in (2, 4, 5)]
    assert told(f'{tmp_path}/plain/ckpt_*.pt') == curve
    assert told(f'{tmp_path}/plain/*.pt,{tmp_path}/pair-?') == curve + seeds
    assert told(f'{tmp_path}/pair-7,{tmp_path}/plain', f'{tmp_path}/pair-4') == [
        ('pair-7', 3, 'pair-7', None), curve[-1], ('pair-4', 3, 'pair-4', None)]
    assert capsys.readouterr().err == ''
    assert told(f'{tmp_path}/pair-4/ckpt_*.pt') == [('pair-4', 1, 'pair-4', None)]
    assert f'{tmp_path}/pair-4: the curve leaves out ckpt_0000003.pt' in capsys.readouterr().err
    assert told(f'{tmp_path}/pair-4/ckpt_*.pt,{tmp_path}/pair-4')[1:] == [('pair-4', 3, 'pair-4', None)]


@pytest.mark.parametrize('changes, message', [
    ({'attention': 'shared'}, "seeds of one system; this run differs: attention is 'shared' there and 'orig"),
    ({'step': 9}, 'step is 9 there and 3 here'), ({'seed': 1}, 'the same seed=1')])
def test_runs_that_are_no_seeds_of_one_system_are_refused(tokenizers, tmp_path, changes, message):
    pretrained(tmp_path / 'run-1', tokenizers['sentencepiece'], seed=1)
    pretrained(tmp_path / 'run-2', tokenizers['sentencepiece'], **{'seed': 2, **changes})
    with pytest.raises(UserError, match=message):
        finetune.find_sources(f'{tmp_path}/run-*', '')


@pytest.mark.parametrize('seed', [1, 2])
def test_pretraining_seeds_from_before_a_field_was_added_and_after(tokenizers, tmp_path, seed):
    for one in (1, 2):
        pretrained(tmp_path / f'run-{one}', tokenizers['sentencepiece'], seed=one)
    path = str(tmp_path / f'run-{seed}' / 'ckpt_0000003.pt')
    content = train.read_checkpoint(path)
    del content['model_config']['same_partition']
    train.write_checkpoint(path, content)
    assert [source.run_seed for source in finetune.find_sources(f'{tmp_path}/run-*', '')] == [1, 2]


def test_the_baseline_is_one_system(run, tokenizers, tmp_path):
    for name in 'ab':
        pretrained(tmp_path / name, tokenizers['sentencepiece'])
    with pytest.raises(UserError, match='several systems; name the baseline alone'):
        finetune.find_sources(run, f'{tmp_path}/a,{tmp_path}/b')


def test_pretraining_seeds_and_several_systems_in_one_command(run, tokenizers, tmp_path, finetune_here,
                                                              monkeypatch, capsys):
    """Every system has a row in every table.  The trials of a run are the same ones, whatever names it."""
    for name in ('pair', 'plain'):
        for seed in (1, 2):
            pretrained(tmp_path / f'{name}-{seed}', tokenizers['sentencepiece'], seed=seed)
    files, out = published(tmp_path, 'cola', n_train=8, n_dev=6), f'--out_dir={tmp_path}/out'
    common = ['--tasks=cola', files, out, '--epochs=1']
    trials = finetune_here(f'--init_from={tmp_path}/pair-*,{run}', f'--compare={tmp_path}/plain-*', *common,
                           '--trials=2', '--noise=0:0.2:0.2')
    assert [(trial['init'], trial['run_seed'], trial['seed']) for trial in trials] == [
        *(('pair', *pair) for pair in itertools.product((1, 2), (1, 2))), ('run', None, 1), ('run', None, 2),
        *(('plain', *pair) for pair in itertools.product((1, 2), (1, 2)))]
    assert len(glob.glob(f'{tmp_path}/out/pair-1@3/cola_?_*')) == 2
    page = capsys.readouterr().out
    assert 'ours: pair, pretraining seed 2 |' in page and '## pair - plain, paired by seed' in page
    noise = page[page.index('## Noise'):]
    assert re.findall(r'^\| (.*), cola \| \S+ \(\S+\) \|', noise, re.M) == ['pair', 'plain', 'run']
    monkeypatch.setattr(train, 'update', None)
    trials = finetune_here(f'--init_from={tmp_path}/pair-1', *common)
    assert [trial['run_seed'] for trial in trials if trial['init'] == 'pair-1'] == [None]
    page = (tmp_path / 'out' / 'results.md').read_text()
    finetune_here('--report=true', out)
    assert (tmp_path / 'out' / 'results.md').read_text().split('\n', 1)[1] == page.split('\n', 1)[1]


def test_two_starts_of_one_name_are_refused_before_anything_runs(run, tokenizers, tmp_path, finetune_here):
    other = pretrained(tmp_path / 'run', tokenizers['sentencepiece'], seed=5)
    later = pretrained(tmp_path / 'run', tokenizers['sentencepiece'], step=9, seed=5)
    for arguments in ([f'--init_from={run}', f'--compare={other}'],
                      [f'--init_from={later}', f'--compare={later}/ckpt_0000003.pt'],
                      [f'--init_from={tmp_path}/*/ckpt_0000003.pt', f'--compare={run}']):
        with pytest.raises(UserError, match='rename a folder'):
            finetune_here(*arguments, '--tasks=cola', published(tmp_path, 'cola'),
                          f'--out_dir={tmp_path}/out')
    assert not glob.glob(f'{tmp_path}/out/*/*')


def test_a_trial_lets_go_of_its_weights(run, tmp_path, finetune_here, monkeypatch):
    made, build = [], finetune.make_classifier
    monkeypatch.setattr(finetune, 'make_classifier', lambda *arguments: made.append(
        weakref.ref(model := build(*arguments))) or model)
    finetune_here(f'--init_from={run}', '--tasks=cola', published(tmp_path, 'cola', n_train=8),
                  f'--out_dir={tmp_path}/out', '--trials=2')
    gc.collect()
    assert [reference() for reference in made] == [None] * 2


def test_what_is_asked_for_later_is_added(run, tmp_path, finetune_here, monkeypatch):
    """Noise levels add up, and nothing is trained again."""
    files = published(tmp_path, 'cola')
    arguments = [f'--init_from={run}', '--tasks=cola', files, f'--out_dir={tmp_path}/out']
    finetune_here(*arguments, '--noise=0:0.2:0.2')
    monkeypatch.setattr(train, 'update', None)
    trial, = finetune_here(*arguments, '--noise=0.1:0.1:0.1', '--predict=test')
    assert list(trial['noise']['cola']) == ['0', '0.2', '0.1']


def test_all_files_are_read_before_the_first_trial(run, tmp_path, finetune_here, monkeypatch, capsys):
    """Also those of the last task, of the test split, and of --predict=FILE."""
    files = published(tmp_path, 'cola', 'rte', 'squad1')
    monkeypatch.setattr(train, 'update', None)
    arguments = [f'--init_from={run}', files, f'--out_dir={tmp_path}/out']
    with pytest.raises(UserError, match='squad1: no test file'):
        finetune_here(*arguments, '--tasks=cola,squad1', '--predict=test')
    with pytest.raises(FileNotFoundError, match='gone.tsv'):
        finetune_here(*arguments, '--tasks=cola', '--predict=gone.tsv')
    path = tmp_path / 'labelled' / 'glue' / 'RTE' / 'test.tsv'
    lines = path.read_text().splitlines()
    path.write_text('\n'.join([*lines[:2], lines[2] + '\textra', *lines[3:]]))
    with pytest.raises(UserError, match=r'test.tsv:3: missing columns: 4 cells, expected 3: index, '):
        finetune_here(*arguments, '--tasks=cola,rte', '--predict=test')
    os.remove(path.with_name('dev.tsv'))
    with pytest.raises(UserError, match=r'RTE: no dev.tsv'):
        finetune_here(*arguments, '--tasks=cola,rte')
    assert not glob.glob(f'{tmp_path}/out/*/*')
    with pytest.raises(TypeError):                      # train.update: now it would begin
        finetune_here(*arguments, '--tasks=cola')
    assert 'cola: train 24, dev 12 examples' in capsys.readouterr().out


def test_a_named_file_is_predicted_beside_the_submission_and_scored(run, tmp_path, finetune_here, capsys):
    arguments = [f'--init_from={run}', '--tasks=cola', published(tmp_path, 'cola'),
                 f'--out_dir={tmp_path}/out']
    trial, = finetune_here(*arguments, '--predict=test')
    folder = folder_of(tmp_path / 'out', 'cola_1')
    with open(os.path.join(folder, 'CoLA.tsv')) as file:
        submission = file.read()
    assert 'labelled examples' not in capsys.readouterr().out
    finetune_here(*arguments, f'--predict={tmp_path}/labelled/glue/CoLA/dev.tsv')
    out, points = capsys.readouterr().out, 100 * trial['scores']['cola']['matthews']
    assert f'cola seed 1, 12 labelled examples: matthews {points:.2f}, accuracy' in out
    with open(os.path.join(folder, 'CoLA.tsv')) as file:
        assert file.read() == submission
    with open(os.path.join(folder, 'dev.CoLA.tsv')) as file:
        assert len(file.read().splitlines()) == 13


def test_own_files_are_a_task_like_any_other(run, tmp_path, finetune_here, monkeypatch, capsys):
    """Trials, differences, noise, a score and predictions of the test file; --report alone knows it too."""
    monkeypatch.setitem(TASKS, 'custom', TASKS['custom'])
    for split, n in (('train', 16), ('dev', 8), ('test', 3)):
        rows = [f'"{("the parser", "a file")[i % 2]}, {i}",{("parser", "file")[i % 2]}\n' for i in range(n)]
        (tmp_path / f'{split}.csv').write_text('text,class\n' + ''.join(rows))
    files = [f'--{split}_file={tmp_path}/{split}.csv' for split in ('train', 'dev', 'test')]
    arguments = ['--tasks=custom', *files, '--texts=text', '--label=class', f'--out_dir={tmp_path}/out',
                 f'--init_from={run}', '--trials=2', '--noise=0.1:0.1:0.1', '--keep_best=true']
    trial, other = finetune_here(*arguments)
    assert set(trial['scores']['custom']) == {'accuracy', 'f1', 'matthews'} and trial['n_train'] == 16
    assert trial['majority']['custom']['accuracy'] == 0.5 and trial['noise']['custom'] and other['seed'] == 2
    out = capsys.readouterr().out
    assert 'custom: train 16, dev 8, test 3 examples; classify: file, parser\n' in out
    assert re.search(r'custom seed 2, 3 labelled examples: accuracy', out) and '| ours: run |' in out
    with open(os.path.join(folder_of(tmp_path / 'out', 'custom_1'), 'predicted.csv')) as file:
        lines = file.read().splitlines()
    assert lines[0] == 'text,class,prediction' and lines[1].startswith('"the parser, 0",parser,')
    assert len(lines) == 4 and {line.split(',')[-1] for line in lines[1:]} <= {'parser', 'file'}
    finetune_here(*arguments, '--trials=1', '--cross=true', f'--predict={tmp_path}/dev.csv')
    os.remove(os.path.join(folder_of(tmp_path / 'out', 'custom_1'), 'model.pt'))
    finetune_here(*arguments)                           # as with keep_models=False: nothing is left to do
    assert os.path.exists(os.path.join(folder_of(tmp_path / 'out', 'custom_1'), 'dev.predicted.csv'))
    assert 'cross=True leaves out custom: no positive label is defined' in capsys.readouterr().err
    assert finetune_here('--report', f'--out_dir={tmp_path}/out') == [trial, other]


@pytest.mark.parametrize('label, columns, values', [
    ('answer,start', ('q', 'text', 'answer', 'start'), ['who', 'the parser reads', 'parser', 4]),
    ('score', ('q', 'text', 'score'), ['who', 'the parser reads', 2.5])])
def test_own_spans_and_numbers(label, columns, values, run, tmp_path, finetune_here, monkeypatch):
    monkeypatch.setitem(TASKS, 'custom', TASKS['custom'])
    for split in ('train', 'dev', 'test'):
        row = dict(zip(columns, values, strict=True))
        rows = [{**row, 'score': i + 0.5} if label == 'score' else row for i in range(8)]
        (tmp_path / f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    files = [f'--{split}_file={tmp_path}/{split}.jsonl' for split in ('train', 'dev', 'test')]
    finetune.load_split.cache_clear()                   # by name of the task
    trial, = finetune_here('--tasks=custom', *files, '--texts=q,text', f'--label={label}',
                           f'--out_dir={tmp_path}/out', f'--init_from={run}')
    assert trial['metric'] == {'score': 'pearson_spearman'}.get(label, 'f1_words')
    folder = folder_of(tmp_path / 'out', 'custom_1')
    rows = [json.loads(line) for line in Path(folder, 'predicted.jsonl').read_text().splitlines()]
    assert len(rows) == 8 and all(list(row) == [*columns, 'prediction'] for row in rows)
    kind = float if label == 'score' else str
    assert all(type(row['prediction']) is kind for row in rows)


def test_a_missing_checkpoint_is_not_looked_for_on_the_hub(tmp_path, finetune_here, monkeypatch):
    monkeypatch.setattr(finetune, 'pretrained_encoder', None)
    for name, command in (('out/quickstart', 'config/quickstart.py'), ('out/mine', '--out_dir=out/mine'),
                          (str(tmp_path), f'--out_dir={tmp_path}')):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match=f'no checkpoint there; python train.py {command} makes it'):
            finetune_here(f'--init_from={name}', '--tasks=cola', f'--out_dir={tmp_path}/out')


def test_help_ends_with_the_tasks(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['finetune.py', '--help'])
    with pytest.raises(SystemExit):
        finetune.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith('usage') and sum(line.startswith('  --') for line in lines) > 40
    assert {'pretraining', 'milestones', 'commas'} <= set(' '.join(lines[-len(TASKS) - 9:]).split())
    rows = [line.split() for line in lines[-len(TASKS):]]
    assert [row[0] for row in rows] == list(TASKS)
    assert ' '.join(rows[0]) == 'cola glue glue/CoLA/ train.tsv dev.tsv test.tsv: matthews, accuracy'


def test_extra_questions_come_first_and_in_a_trial_of_their_own(run, tmp_path, finetune_here):
    """Each part with its own schedule, as in two commands; the plain trial shares neither folder nor row."""
    files = published(tmp_path, 'squad1', n_train=12)
    with open(tmp_path / 'labelled' / 'squad' / 'train-v1.1.json') as file:
        extra = json.load(file)
    question = extra['data'][0]['paragraphs'][0]['qas'][0]
    question['answers'] = [{'text': 'nowhere to be found', 'answer_start': 0}]
    (tmp_path / 'extra.json').write_text(json.dumps(extra))
    arguments = [f'--init_from={run}', '--tasks=squad1', files, f'--out_dir={tmp_path}/out',
                 '--log_interval=1', *PLAIN]
    plain, = finetune_here(*arguments)
    more, = (trial for trial in finetune_here(*arguments, f'--extra_train={tmp_path}/extra.json')
             if 'n_extra_train' in trial)
    assert more['n_train'] == plain['n_train'] == 12 and more['n_extra_train'] == 11
    assert more['skipped']['extra_train'] == {finetune.NO_ANSWER: 1, finetune.ABSENT: 1}
    assert more['data'].keys() - plain['data'].keys() == {'extra_train'}
    page = (tmp_path / 'out' / 'results.md').read_text()
    assert 'ours: run extra_train= |' in page and f'ours: run extra_train={tmp_path}/extra.json |' in page

    def lines(folder):
        with open(os.path.join(folder, 'metrics.jsonl')) as file:
            return [line for line in map(json.loads, file) if line['kind'] != 'val']

    alone, both = sorted(map(lines, glob.glob(f'{tmp_path}/out/*/squad1_1_*')), key=len)        # two folders
    first = [line for line in both if line['kind'] == 'extra_train']
    assert both[:len(first)] == first and [line['step'] for line in both] == [*range(1, len(both) + 1)]
    assert [line['lr'] for line in both[len(first):]] == [line['lr'] for line in alone]
    assert first[-1]['lr'] < first[0]['lr'] and both[len(first)]['loss'] != alone[0]['loss']
    (tmp_path / 'extra.json').write_text(json.dumps({'data': extra['data'][1:]}))       # of the same name
    assert len(finetune_here(*arguments, f'--extra_train={tmp_path}/extra.json')) == 3


def test_seeds_change_the_head_and_the_order(run, tmp_path, finetune_here):
    finetune_here(f'--init_from={run}', '--tasks=cola', published(tmp_path, 'cola'),
                  f'--out_dir={tmp_path}/out', '--trials=2')
    one, other = (train.read_checkpoint(os.path.join(folder_of(tmp_path / 'out', f'cola_{seed}'), 'model.pt'))
                  for seed in (1, 2))
    assert not torch.equal(one['model']['classifier.weight'], other['model']['classifier.weight'])
    assert not torch.equal(one['model']['pooler.dense.weight'], other['model']['pooler.dense.weight'])


@pytest.mark.parametrize('name', ['stsb', 'squad2', pytest.param('c3', marks=pytest.mark.slow)])
def test_padding_to_the_block_changes_nothing(name, run, tmp_path, finetune_here):
    arguments = [f'--init_from={run}', f'--tasks={name}', published(tmp_path, name), *PLAIN]
    finetune_here(*arguments, f'--out_dir={tmp_path}/a')
    finetune_here(*arguments, f'--out_dir={tmp_path}/b', '--pad_to_block=true')
    start = train.read_checkpoint(train.newest_checkpoint(run))['model']
    one, other = weights(tmp_path / 'a'), weights(tmp_path / 'b')
    moved = {key: (one[key] - start[key]).abs().max() for key in one if key in start}
    assert max(moved.values()) > 1e-4
    assert all((one[key] - other[key]).abs().max() < 1e-6 for key in one)


def test_longer_rows_than_pretrained(run, tokenizers, tmp_path, finetune_here):
    longer = pretrained(tmp_path / 'rope', tokenizers['sentencepiece'], position='rope')
    for source in (run, longer):
        trial, = finetune_here(f'--init_from={source}', '--tasks=squad1', published(tmp_path, 'squad1'),
                               '--block_size=96', f'--out_dir={tmp_path}/{os.path.basename(source)}')
        assert trial['model']['block_size'] == 96


def test_a_fine_tuned_model_is_a_start_too(run, tmp_path, finetune_here):
    """As for RTE from MNLI: the encoder and the pooler go on, the classifier is new."""
    files = published(tmp_path, 'mnli', 'rte')
    finetune_here(f'--init_from={run}', '--tasks=mnli', files, f'--out_dir={tmp_path}/mnli')
    source = glob.glob(f'{tmp_path}/mnli/*/*/model.pt')[0]
    trial, = finetune_here(f'--init_from={source}', '--tasks=rte', files, f'--out_dir={tmp_path}/rte')
    assert trial['init'] == f"{os.path.basename(os.path.dirname(source))}_model" and trial['step'] is None


def test_a_bar_for_each_trial_on_a_terminal(run, tmp_path, finetune_here, capsys, monkeypatch):
    """Of the first process of each machine; what stays are the lines of a file."""
    arguments = [f'--init_from={run}', '--tasks=rte', published(tmp_path, 'rte', n_train=8, n_dev=6),
                 '--log_interval=1']
    finetune_here(*arguments, f'--out_dir={tmp_path}/file')
    plain = capsys.readouterr()
    with terminal() as texts:
        finetune_here(*arguments, f'--out_dir={tmp_path}/terminal')
    assert re.search(r'rte seed 1: .*\d/\d+ \[.*<.*step/s, loss=\d.*, accuracy=0', ''.join(texts))
    shown, filed = ([line for line in lines if 'accuracy of' in line]
                    for lines in (seen(texts), plain.out.splitlines()))
    assert shown == filed and len(filed) == 2 and not plain.err
    monkeypatch.setenv('LOCAL_RANK', '1')
    with terminal() as texts:
        assert list(train.progress([5], 1, 'step')) == [5]
    assert texts == []


def test_overrides_are_of_their_task_alone(run, tmp_path, finetune_here):
    trials = finetune_here(f'--init_from={run}', '--tasks=cola,mrpc', published(tmp_path, 'cola', 'mrpc'),
                           f'--out_dir={tmp_path}/out', '--overrides=cola.epochs=1 mrpc.metric=f1')
    assert [(t['task'], t['epochs'], t['metric']) for t in trials] == [('cola', 1, 'matthews'),
                                                                       ('mrpc', 2, 'f1')]


def test_comparison_curve_noise_cross_and_time(run, tokenizers, tmp_path, finetune_here, capsys):
    for step in (1, 5):
        pretrained(tmp_path / 'many', tokenizers['sentencepiece'], step, seed=step)
    trials = finetune_here(f'--init_from={tmp_path}/many/ckpt_*.pt', f'--compare={run}', '--tasks=mrpc,mnli',
                           '--trials=2', published(tmp_path, 'mrpc', 'mnli', n_train=8, n_dev=6),
                           '--epochs=1', f'--out_dir={tmp_path}/out',
                           '--noise=0:0.4:0.2', '--cross=true')
    assert [t['step'] for t in trials] == [1] * 4 + [5] * 4 + [3] * 4 and len(trials) == 12
    for trial in trials:
        noise = trial['noise'][trial['task']]
        assert list(noise) == ['0', '0.2', '0.4']
        assert noise['0'] == trial['scores'][trial['task']][trial['metric']]
        assert set(trial['cross']) == {'mrpc', 'mnli'}
        assert trial['cross'][trial['task']] == trial['scores'][trial['task']]['accuracy']
        assert trial['seconds_per_epoch'] > 0
    out = capsys.readouterr().out
    page = (tmp_path / 'out' / 'results.md').read_text()
    assert page.split('\n', 2)[2].strip() in out
    assert out.count(' of 12: ') == 12
    assert (tmp_path / 'out' / 'curve.png').stat().st_size > 1000
    assert 'many - run, paired by seed' in page and 'reached at' in page and 'Trained on' in page


def test_cross_task_labels_mean_yes_or_no(monkeypatch):
    """A three-way model on two-way labels and the other way round: entailment is yes, all else is no."""
    examples = [Example(i, ('a', 'b'), label) for i, label in enumerate([0, 0, 1, 1])]

    def scores(name, predictions, others):
        monkeypatch.setattr(finetune, 'predict_split', lambda *details: (np.array(predictions), []))
        trial = SimpleNamespace(name=name, task=TASKS[name],
                                split=lambda split, name: finetune.Split(examples, [], {}))
        return finetune.cross_scores(trial, None, CPU, others)

    assert scores('mnli', [0, 2, 1, 0], ['mnli', 'qnli', 'qqp']) == {       # qnli: yes is 0; qqp: yes is 1
        'mnli': 0.5, 'qnli': 0.5, 'qqp': 0.5}
    assert scores('mnli', [0, 0, 1, 2], ['mnli', 'qnli', 'qqp']) == {'mnli': 0.75, 'qnli': 1.0, 'qqp': 0.0}
    assert scores('mrpc', [1, 1, 0, 0], ['mnli', 'mrpc']) == {'mnli': 1.0, 'mrpc': 0.0}


def test_noise_has_its_share_of_the_mean_norm(run):
    start = finetune.read_start(train.newest_checkpoint(run), '', True)
    model = finetune.make_classifier(start, HEADS['classify'], settings(), 2).eval()
    examples = [Example(i, ('some words ' * (i + 1),), 0) for i in range(7)]
    features = HEADS['classify'].features(examples, start.tokenizer, 48, 16)
    with torch.no_grad():
        embedded = [model.encoder.embed(torch.from_numpy(f.rows[0][0].astype(np.int64))[None])[0]
                    for f in features]
        mean = torch.cat(embedded).norm(dim=-1).mean()
        hook = finetune.add_noise(model, features, (start.tokenizer.special,), CPU, 0.25)
        for f, plain in zip(features, embedded, strict=True):
            noise = model.encoder.embed(torch.from_numpy(f.rows[0][0].astype(np.int64))[None])[0] - plain
            assert (noise.norm(dim=-1) - 0.25 * mean).abs().max() < 1e-4
        hook.remove()


def test_evaluation_is_that_of_single_rows(run):
    start = finetune.read_start(train.newest_checkpoint(run), '', True)
    model = finetune.make_classifier(start, HEADS['classify'], settings(), 3)
    examples = [Example(i, ('to be ' * (1 + 7 * i % 11), 'or not'), 0) for i in range(150)]
    features = HEADS['classify'].features(examples, start.tokenizer, 48, 16)
    outputs = finetune.run_head(model, features, stand_in(HEADS['classify']), CPU)
    assert model.training and len(outputs) == 150
    with torch.no_grad():
        for feature, output in list(zip(features, outputs, strict=True))[::17]:
            ids = torch.from_numpy(feature.rows[0][0].astype(np.int64))[None]
            wanted = model.eval()(ids, (torch.arange(ids.size(1)) >= feature.rows[0][1]).long()[None])[0]
            assert np.abs(np.array(output) - wanted.numpy()).max() < 1e-5


def test_majority_is_the_most_frequent_training_label():
    examples = [Example(i, ('a',), label) for i, label in enumerate([1, 1, 0])]
    assert finetune.majority_of('cola', examples, 4) == [1] * 4
    assert finetune.majority_of('stsb', examples, 2) == [2 / 3] * 2
    spans = [Example(i, ('q', 'c'), label) for i, label in enumerate([(), (('x', 0),), ()])]
    assert finetune.majority_of('squad2', spans, 2) == ['', '']


# ---- processes ----

def test_two_processes_give_the_trials_of_one(run, tmp_path, finetune_here, monkeypatch, capsys):
    """To the bit; each takes every second trial, and the one that finds all finished reports."""
    files = published(tmp_path, 'cola', 'squad2', n_train=12)
    arguments = [f'--init_from={run}', '--tasks=cola,squad2', files]
    one = finetune_here(*arguments, f'--out_dir={tmp_path}/one')
    capsys.readouterr()
    for rank in (0, 1):
        for key, value in (('RANK', rank), ('LOCAL_RANK', rank), ('WORLD_SIZE', 2)):
            monkeypatch.setenv(key, str(value))
        two = finetune_here(*arguments, f'--out_dir={tmp_path}/two')
        assert len(two) == 1 + rank and ('## Every metric' in capsys.readouterr().out) == bool(rank)
    assert [trial['scores'] for trial in one] == [trial['scores'] for trial in two]
    for name in ('cola_1', 'squad2_1'):
        folders = [folder_of(tmp_path / part, name) for part in ('one', 'two')]
        texts = [Path(folder, 'predictions.jsonl').read_text() for folder in folders]
        assert texts[0] == texts[1] and os.path.basename(folders[0]) == os.path.basename(folders[1])


@pytest.mark.slow
def test_torchrun_shares_the_trials(run, tmp_path):
    arguments = ['finetune.py', *QUICK, f'--init_from={run}', '--tasks=cola', published(tmp_path, 'cola')]
    done = torchrun(*arguments, '--trials=3', f'--out_dir={tmp_path}/out')
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('of 2: ') == 2 and done.stdout.count('of 1: ') == 1
    assert done.stdout.count('## Every metric') >= 1


@pytest.mark.slow
def test_a_signal_ends_a_real_process_with_its_status(run, tmp_path):
    arguments = ['finetune.py', *QUICK, f'--init_from={run}', '--tasks=cola', published(tmp_path, 'cola'),
                 f'--out_dir={tmp_path}/out', '--epochs=4000', '--log_interval=5']
    process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)
    while ' step 5/' not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM and 'Traceback' not in err


# ---- what a user can get wrong ----

@pytest.mark.parametrize('arguments, message', [
    (['--tasks=colla'], "tasks='colla': choose one of"),
    (['--tasks='], 'tasks='), (['--paper=smith'], "paper='smith': choose one of"),
    (['--init_from=nowhere'], 'nowhere: neither a checkpoint nor a BERT'),
    (['--init_from=out/nowhere'], 'no checkpoint there'),
    (['--init_from=nowhere/*.pt'], 'no such file'),
    (['--noise=0.4'], "noise='0.4': write first:last:step"), (['--noise=0:1:0'], 'noise'),
    (['--overrides=cola.epoch=1'], 'overrides'), (['--overrides=epochs=1'], 'overrides'),
    (['--overrides=cola.epochs=x'], 'epochs'),
    (['--overrides=cola.epochs=0'], 'epochs=0: must be at least 1'),
    (['--schedule=up'], 'schedule'), (['--keep_best=2'], 'keep_best'), (['--compare=gone'], 'neither'),
    (['--pooling=mean'], 'pooling'), (['--out_dir='], 'out_dir'), (['--min_lr=1'], 'min_lr'),
    (['--metric=f9'], 'metric'),
    (['--block_size=7'], 'block_size'), (['--data_dir=nowhere'], 'nowhere'),
    (['--tokenizer=nowhere'], 'nowhere'), (['--predict=gone.tsv'], 'gone.tsv'),
    (['--learning_rate=0'], 'learning_rate'), (['--dropout=1'], 'dropout'), (['--trials=0'], 'trials'),
    (['--beta1=1'], 'beta1'), (['--predict=x.tsv', '--tasks=cola,rte'], 'a file is of one task'),
])
def test_bad_input_gets_one_line(run, tmp_path, finetune_here, arguments, message):
    files = published(tmp_path, 'cola', n_train=4, n_dev=4)
    with pytest.raises((UserError, OSError), match=message) as caught:
        finetune_here(f'--init_from={run}', '--tasks=cola', files, f'--out_dir={tmp_path}/out', *arguments)
    assert '\n' not in str(caught.value)


def test_exit_status_of_a_mistake(run, tmp_path):
    line = refused(stage('finetune.py', f'--init_from={run}', '--tasks=cola', f'--data_dir={tmp_path}',
                         f'--out_dir={tmp_path}/o'))
    assert 'CoLA' in line and '--data_dir' in line


def test_a_diverging_trial_is_named(run, tmp_path, finetune_here):
    with pytest.raises(UserError, match=r'cola seed 1: loss or gradient norm of step \d+ is not finite'):
        finetune_here(f'--init_from={run}', '--tasks=cola', published(tmp_path, 'cola'),
                      f'--out_dir={tmp_path}/out', '--learning_rate=1e30', '--warmup_fraction=0',
                      '--epochs=20')


def test_a_damaged_result_is_named(run, tmp_path, finetune_here):
    arguments = [f'--init_from={run}', '--tasks=cola', published(tmp_path, 'cola'),
                 f'--out_dir={tmp_path}/out']
    finetune_here(*arguments)
    path = os.path.join(folder_of(tmp_path / 'out', 'cola_1'), 'result.json')
    for text in ('{', '[]', '{"scores": {}}'):
        with open(path, 'w') as file:
            file.write(text)
        with pytest.raises(UserError, match='result.json: damaged, or of an earlier version'):
            finetune_here(*arguments)


def test_a_model_that_was_not_kept_is_asked_for(run, tmp_path, finetune_here):
    arguments = [f'--init_from={run}', '--tasks=cola', published(tmp_path, 'cola'),
                 f'--out_dir={tmp_path}/out']
    finetune_here(*arguments, '--keep_models=false')
    with pytest.raises(UserError, match='model.pt: cannot be read'):
        finetune_here(*arguments, '--noise=0:0.1:0.1')


# ---- recipes ----

RECIPES = {     # SPEC's table: epochs, batch, rate, warmup, schedule, decay, dropout, attention dropout
    'glue_courtois': (5, 16, 1e-5, 0.0, 'linear', 0.01, 0.1, 0.1),
    'glue_kowsher': (10, 16, 1e-4, 0.0, 'thirds', 0.1, 0.1, 0.1),
    'squad_kowsher': (5, 16, 1e-4, 0.0, 'thirds', 0.1, 0.2, 0.05),
    'glue_tian': (10, 16, 1e-5, 0.1, 'linear', 0.01, 0.1, 0.1),
    'squad_tian': (10, 16, 1e-5, 0.1, 'linear', 0.01, 0.1, 0.1),
}


def knobs_of(name):
    return configure(dict(vars(finetune)), [os.path.join(ROOT, 'config', f'{name}.py')])[0]


@pytest.mark.parametrize('name', RECIPES)
def test_recipes_of_the_papers(name):
    config = knobs_of(name)
    for task in finetune.find_tasks(config['tasks']):
        r = finetune.recipe(config, task)
        epochs, batch, rate, *others = RECIPES[name]
        rate = 5e-6 if name == 'glue_tian' and task in ('cola', 'sst2') else rate
        assert (r['epochs'], r['total_batch'], r['learning_rate']) == (epochs, batch, rate)
        assert [r[k] for k in ('warmup_fraction', 'schedule', 'weight_decay', 'dropout',
                               'attention_dropout')] == others
        assert ('tian' in name) == (r['keep_best'] and r['eval_interval'] == 1000)
    if name == 'glue_courtois':
        assert config['trials'] == 5 and finetune.recipe(config, 'mrpc')['metric'] == 'f1_accuracy'
    rates = [train.get_lr(step, 1e-4, 0.0, 0, 9, 'thirds') for step in range(9)]
    assert rates == pytest.approx([1e-4] * 3 + [2e-5] * 3 + [2e-6] * 3)


def test_recipe_of_liu():
    config = knobs_of('clue_liu')
    rows = {'afqmc': (3, 16, 3e-5), 'csl': (4, 16, 2e-5), 'iflytek': (5, 32, 3e-5), 'tnews': (3, 16, 2e-5),
            'wsc': (40, 16, 1e-5), 'cmnli': (3, 32, 3e-5), 'cmrc': (3, 32, 3e-5), 'chid': (3, 32, 3e-5),
            'c3': (8, 24, 2e-5)}
    assert finetune.find_tasks(config['tasks']) == list(rows) == finetune.find_tasks('clue')
    for task, row in rows.items():
        r = finetune.recipe(config, task)
        assert (r['epochs'], r['total_batch'], r['learning_rate']) == row
        assert (r['warmup_fraction'], r['adam_eps'],
                r['weight_decay'], r['block_size']) == (0.1, 1e-8, 0.01, 512)
        assert r['dropout'] == r['attention_dropout'] == 0.1
