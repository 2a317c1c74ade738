"""prepare_data.py: the same bytes from any reader, process and part; no unit lost, no text in both splits."""
import errno
import glob
import gzip
import itertools
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import types

import datasets
import huggingface_hub
import numpy as np
import pyarrow.parquet
import pytest
import scipy.stats
import sentencepiece
import tiktoken
import torch
import transformers
import zstandard
from conftest import ROOT, flip, launch, process, refused, torchrun, words

import prepare_data
from configurator import UserError, configure

DEFAULTS = configure(dict(vars(prepare_data)), prepare_data.MINIMUM, [])
WORDS = ['red', 'green', 'blue', 'small', 'large', 'quick', 'slow', 'river', 'mountain', 'house', 'walks',
         'sings', 'reads', 'under', 'over', 'the', 'of', 'and', '[MASK]']
VOCAB = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '[', ']', 'mask', 'the', 'of', 'and', 'red', 'ri',
         '##ver', 'walks']
CHINESE = ['宝玉', '黛玉', '林妹妹', '笑道', '我们', '的', '北京', '来到', 'T恤', 'models', 'Éa',
           '２０', 'ＡＢ', '，', '。“', ' ', '\u3000\u3000', '\r\n', '\u200b', '𠮷', '䷀', 'は', '~~',
           '[MASK]']


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(os, 'fsync', lambda file: None)
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'SLURM_PROCID', 'SLURM_NTASKS'):
        monkeypatch.delenv(name, raising=False)


def knobs(home, **changes):
    return {**DEFAULTS, 'data_dir': str(home / 'data'), 'name': 'x', 'vocab_size': 60, 'num_proc': 1,
            'val_fraction': 0.1, **changes}


def prepare(home, texts=None, **changes):
    """(folder, meta) of a prepared corpus: of texts, each a line of a file, or as the knobs say."""
    if texts:
        changes['corpus'] = write_jsonl(home / 'a.jsonl', texts)
    folder = prepare_data.prepare(knobs(home, **changes))
    return folder, prepare_data.load_meta(folder)


def make_texts(count, seed=0, pieces=WORDS, between=' '):
    """Texts of 3 to 60 words, all different."""
    pick = random.Random(seed)
    return [f'{i} ' + between.join(pick.choices(pieces, k=pick.randint(3, 60))) for i in range(count)]


def write_jsonl(file, texts):
    pathlib.Path(file).write_text(''.join(json.dumps({'id': 1, 'text': text}) + '\n' for text in texts))
    return str(file)


def read_split(folder, meta, split):
    """The documents of a split as tuples of ids without [SEP]; checks the .idx files on the way."""
    documents = []
    for shard in meta['splits'][split]:
        stem = os.path.join(folder, shard['stem'])
        ids = np.fromfile(f'{stem}.bin', meta['dtype'])
        edges = np.fromfile(f'{stem}.idx', '<i8')
        assert edges[0] == 0
        assert edges[-1] == len(ids) == shard['tokens']
        assert len(edges) - 1 == shard['documents']
        # each document ends with [SEP], which is nowhere else
        assert np.array_equal(edges[1:] - 1, np.flatnonzero(ids == meta['special']['sep']))
        documents += [tuple(ids[begin:end - 1].tolist()) for begin, end in itertools.pairwise(edges)]
    return documents


def read_all(folder, meta):
    return sorted(read_split(folder, meta, 'train') + read_split(folder, meta, 'val'))


def entropy_of(documents):
    return pytest.approx(scipy.stats.entropy(np.bincount(np.concatenate(documents))), rel=1e-12)


def encoded(folder, texts):
    return list(map(tuple, prepare_data.load_tokenizer(folder).encode(texts)))


def contents(folder):
    """{path within a folder: bytes} of all files."""
    files = (item for item in sorted(pathlib.Path(folder).rglob('*')) if item.is_file()
             and not item.name.startswith('lock'))
    return {str(item.relative_to(folder)): item.read_bytes() for item in files}


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """{kind of tokenizer: the knob}; the names of tiktoken are a small encoding without a network."""
    (tmp_path / 'vocab.txt').write_text('\n'.join(VOCAB) + '\n')
    ranks = {token: i for i, token in enumerate([*(bytes([i]) for i in range(256)), b' t', b'he'])}
    pattern = r' ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+'
    small = tiktoken.Encoding('small', pat_str=pattern, mergeable_ranks=ranks, special_tokens={'<end>': 300})
    monkeypatch.setattr(tiktoken, 'get_encoding', {'small': small}.__getitem__)
    return {'sentencepiece': 'sentencepiece', 'wordpiece': f'wordpiece:{tmp_path}/vocab.txt',
            'character': 'character', 'tiktoken': 'tiktoken:small'}


# ---- tokenizers ----

@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_every_document_once_in_order_and_literal_mask_is_text(tmp_path, specs, kind):
    texts = [*make_texts(300), 'the red [MASK] walks']
    folder, meta = prepare(tmp_path, texts, tokenizer=specs[kind], unit_bytes=10_000)
    direct = encoded(folder, texts)
    held_out = [prepare_data.text_hash(text, prepare_data.HASH_SEED) < 0.1 * 2**64 for text in texts]
    assert len(meta['splits']['val']) > 3
    assert any(held_out)
    assert read_split(folder, meta, 'val') == list(itertools.compress(direct, held_out))
    assert read_split(folder, meta, 'train') == list(itertools.compress(direct, np.logical_not(held_out)))
    assert meta['unigram_entropy'] == entropy_of(read_split(folder, meta, 'train'))

    tokenizer = prepare_data.load_tokenizer(folder)
    special_ids = tokenizer.special_ids
    assert set(special_ids) - {'unk'} == {'pad', 'cls', 'sep', 'mask'}
    assert ('unk' in special_ids) == (kind != 'tiktoken')
    assert tokenizer.pieces[special_ids['mask']] == '[MASK]'
    assert not set(direct[-1]) & set(special_ids.values())      # "[MASK]" in a text is text
    assert 'mask' in tokenizer.decode(direct[-1]).lower()
    assert len(tokenizer.pieces) == meta['vocab_size']
    if kind == 'tiktoken':
        assert special_ids['pad'] == 301                        # after the ids of its own special tokens


STARTS_WORD = {'sentencepiece': lambda piece: piece[:1] == '\u2581',
               'wordpiece': lambda piece: piece[:2] != '##',
               'character': lambda piece: piece[:2] != '##',
               'tiktoken': lambda piece: not piece[:1].isalnum() and piece[:1] != '\ufffd'}


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_which_pieces_start_a_word(tmp_path, specs, kind):
    folder, _ = prepare(tmp_path, make_texts(100), tokenizer=specs[kind])
    tokenizer = prepare_data.load_tokenizer(folder)
    starts = np.fromfile(os.path.join(folder, 'tokenizer', 'word_start.bin'), bool)
    expected = [STARTS_WORD[kind](piece) for piece in tokenizer.pieces]
    for i in tokenizer.special_ids.values():
        expected[i] = True
    assert starts.tolist() == expected
    assert not all(expected)


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_a_validation_corpus_with_the_tokenizer_of_another(tmp_path, specs, kind):
    """val_fraction=1 and tokenizer=FOLDER: the ids that the other's tokenizer gives, all held out."""
    texts = make_texts(50, seed=1)
    first, meta = prepare(tmp_path, make_texts(100), tokenizer=specs[kind], lower_case=False)
    folder, other = prepare(tmp_path, texts, tokenizer=first, val_fraction=1.0, name='ptb', unit_bytes=3000)
    assert other['identity']['tokenizer'] == meta['identity']['tokenizer']
    assert other['tokenizer'] == meta['tokenizer']
    assert other['special'] == meta['special']
    assert read_split(folder, other, 'val') == encoded(first, texts)
    assert not read_split(folder, other, 'train')
    assert other['unigram_entropy'] == entropy_of(encoded(first, texts))
    prepare_data.check_corpus(folder, other, sums=True)


def test_identity(tmp_path):
    """It is of what makes the ids, not of where it lies."""
    texts = make_texts(300)
    folder, meta = prepare(tmp_path, texts, unit_bytes=20_000)
    assert meta['special'] == {'pad': 0, 'unk': 1, 'cls': 2, 'sep': 3, 'mask': 4}
    given = f'sentencepiece:{folder}/tokenizer/sentencepiece.model'
    for name, changes, same in (('same', {'tokenizer': given}, [True, True, True]),
                                ('fewer', {'vocab_size': 50}, [False, False, False]),
                                ('more', {'tokenizer': given, 'val_fraction': 0.3}, [True, False, False])):
        other = prepare(tmp_path, texts, unit_bytes=20_000, name=name, **changes)[1]
        assert [other['identity'][key] == value for key, value in meta['identity'].items()] == same


def test_case_and_size_of_a_bert_vocabulary(tmp_path):
    """lower_case=False keeps capitals; CR LF ends a line, U+2028 does not; more than 65,536 ids: uint32."""
    pieces = ['[PAD]', '\u2028', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'red', 'Red', '\x85']
    texts = [f'Red red w65999{" red" * i}' for i in range(30)]
    for lower_case, first in ((False, (7, 6)), (True, (6, 6))):
        (tmp_path / 'vocab.txt').write_bytes('\r\n'.join([*pieces, '']).encode())
        folder, meta = prepare(tmp_path, texts, tokenizer=f'wordpiece:{tmp_path}/vocab.txt',
                               lower_case=lower_case, name=str(lower_case))
        assert meta['vocab_size'] == len(pieces)
        assert meta['special']['unk'] == 2
        assert {ids[:2] for ids in read_all(folder, meta)} == {first}
        pieces += [f'w{i}' for i in range(66000)] if len(pieces) < 10 else []
    assert meta['dtype'] == 'uint32'
    assert {ids[2] for ids in read_all(folder, meta)} == {66008}


def test_characters_by_falling_frequency(tmp_path):
    texts = ['好好好好好，，，，Ba b\u3000A', '人人人人é～～～Ｚ']
    folder, _ = prepare(tmp_path, texts, tokenizer='character', val_fraction=0.4)
    # 好 5, ， and 人 4 (U+4EBA is before U+FF0C), ～ 3, a and b 2, e and ｚ 1; white space is no piece
    pieces = [*VOCAB[:5], '好', '人', '，', '～', '##～', 'a', '##a', 'b', '##b', 'e', '##e', 'ｚ', '##ｚ']
    assert contents(folder)['tokenizer/vocab.txt'].decode().split('\n') == [*pieces, '']
    tokenizer = prepare_data.load_tokenizer(folder)
    ids, = tokenizer.encode(['Bé好baz'])
    assert [tokenizer.pieces[i] for i in ids] == ['b', '##e', '好', '[UNK]']
    cut, _ = prepare(tmp_path, texts, tokenizer='character', val_fraction=0.4, vocab_size=17, name='cut')
    assert contents(cut)['tokenizer/vocab.txt'].decode().split('\n') == [*pieces[:16], '']   # 'e' needs two


def test_long_lines_count_for_sentencepiece(tmp_path):
    """A text of one line of 6,000 characters, as web pages have them, is not lost to the vocabulary."""
    long = [f'{i} ' + ' '.join(WORDS[:-1] * 70) for i in range(20)]
    assert min(map(len, long)) > 4192
    folder, meta = prepare(tmp_path, long + [f'zq{i} xj' for i in range(20)], vocab_size=45)
    assert meta['special']['unk'] not in encoded(folder, ['mountain walks'])[0]
    chinese = '\u5b9d\u7389' * 3000
    lines = list(prepare_data.short_lines(f'{long[0]}\nshort\n{chinese}'))
    assert max(len(line.encode()) for line in lines) <= 4192
    assert ''.join(lines) == f'{long[0]}short{chinese}'
    cut = lines[:lines.index('short')]
    assert all(line.startswith(' ') for line in cut[1:])        # no word is cut


@pytest.mark.parametrize('kind, lower_case', [('sentencepiece', True), ('sentencepiece', False),
                                              ('wordpiece', True)])
def test_exported_copy_gives_our_ids(tmp_path, specs, kind, lower_case):
    texts = [*make_texts(100, 3, CHINESE[:-1], ''), *make_texts(60, pieces=WORDS[:-1]),
             *30 * ['The Red'], ' Straße ﬁne ＦＵＬＬ\u3000width ½ É ']
    folder, _ = prepare(tmp_path, texts, tokenizer=specs[kind], lower_case=lower_case, vocab_size=150)
    ours = prepare_data.load_tokenizer(folder)
    theirs = prepare_data.fast_tokenizer(ours, 64)
    for text, our_ids in zip(texts, ours.encode(texts), strict=True):
        their_ids = theirs(text, add_special_tokens=False)['input_ids']
        if their_ids != our_ids:                                # a tie
            our_score = sum(map(ours.model.get_score, our_ids))
            their_score = sum(map(ours.model.get_score, their_ids))
            assert our_score == pytest.approx(their_score, rel=1e-5), text
    assert ours.decode(ours.encode(['The Red'])[0]) == ('the red' if lower_case else 'The Red')
    pad, cls, mask, sep = (ours.special_ids[key] for key in ('pad', 'cls', 'mask', 'sep'))
    the, of = ours.encode(['the', 'of'])
    assert theirs('the [MASK] of')['input_ids'] == [cls, *the, mask, *of, sep]
    assert (theirs.model_max_length, theirs.pad_token_id, theirs.mask_token_id) == (64, pad, mask)


@pytest.mark.parametrize('options, fits', [
    ({}, True), ({'normalization_rule_name': 'identity'}, True), ({'model_type': 'bpe'}, False),
    ({'byte_fallback': True}, False), ({'add_dummy_prefix': False}, False)])
def test_a_model_that_is_exported_gives_its_ids_or_is_refused(tmp_path, options, fits):
    texts = make_texts(200, pieces=WORDS[:-1])
    model = tmp_path / 'a.model'
    with open(model, 'wb') as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=330, hard_vocab_limit=False,
            minloglevel=2, **options)
    folder, _ = prepare(tmp_path, texts, tokenizer=f'sentencepiece:{model}')
    tokenizer = prepare_data.load_tokenizer(folder)
    if not fits:
        with pytest.raises(UserError, match='only a .model of unigrams'):
            prepare_data.fast_tokenizer(tokenizer, 64)
        return
    theirs = prepare_data.fast_tokenizer(tokenizer, 64)(texts, add_special_tokens=False)['input_ids']
    assert theirs == tokenizer.encode(texts)


def maskable(kind, tokenizer, text, ids, offsets):
    """The tokens of a text that a [MASK] can stand for."""
    pieces = [tokenizer.pieces[i] for i in ids]
    places = []
    for i, (begin, _) in enumerate(offsets):
        if kind == 'sentencepiece':
            whole = pieces[i - 1:i] != ['\u2581']               # else the mask is of the space before it, too
        elif kind == 'tiktoken':                                # here too; and a character may be two tokens
            whole = text[begin] == ' ' or text[begin - 1:begin] != ' '
            whole = whole and '\ufffd' not in pieces[i]
        else:
            whole = not any(piece.startswith('##') for piece in pieces[i:i + 2])
        if whole:
            places.append(i)
    return places


def check_masked(kind, tokenizer, texts):
    """Each place alone, all of them, and a random half; returns the share of places that can be masked."""
    exported = None if kind == 'tiktoken' else prepare_data.fast_tokenizer(tokenizer, 512)
    mask = tokenizer.special_ids['mask']
    pick = random.Random(0)
    n_tokens = n_places = 0
    for text, (ids, offsets) in zip(texts, tokenizer.encode_offsets(texts), strict=True):
        places = maskable(kind, tokenizer, text, ids, offsets)
        n_tokens += len(ids)
        n_places += len(places)
        half = [i for i in places if pick.random() < 0.5]
        for masked in [*([i] for i in places), places, half]:
            parts, end = [], 0
            for i in masked:
                space = ' ' if text[offsets[i][0]] == ' ' else ''
                parts.append(text[end:offsets[i][0]] + space)
                end = offsets[i][1]
            parts.append(text[end:])
            first, *others = tokenizer.encode_parts(parts)
            ours = [*first, *itertools.chain.from_iterable([mask, *part] for part in others)]
            assert ours == [mask if i in masked else token for i, token in enumerate(ids)], parts
            if exported:
                assert exported('[MASK]'.join(parts), add_special_tokens=False)['input_ids'] == ours, parts
    return n_places / n_tokens


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_masked_text_has_the_ids_of_training_but_for_the_masks(tmp_path, kind, specs):
    """Before punctuation, inside a word's pieces, in a row, at both ends; with the exported tokenizer too."""
    texts = ['The river (of red).', 'the, the "of"', 'walks  riverriver 2of', 'red', '我们 来到，北京']
    (tmp_path / 'vocab.txt').write_text('\n'.join([*VOCAB, *'().,"', '']))
    folder, _ = prepare(tmp_path, [f'{text} {i}' for i, text in enumerate(texts * 30)], tokenizer=specs[kind])
    assert check_masked(kind, prepare_data.load_tokenizer(folder), texts) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize('kind, least', [('sentencepiece', 0.95), ('wordpiece', 0.4), ('character', 0.05),
                                         ('tiktoken', 0.8)])
def test_masks_in_a_hundred_real_sentences(tmp_path, corpus, specs, kind, least):
    lines = pathlib.Path(corpus, 'docstrings.jsonl').read_text().splitlines()
    sentences = re.split(r'(?<=[.!?])\s+|\n+', ' '.join(json.loads(line)['text'] for line in lines))
    sentences = [text for text in sentences if 40 < len(text) < 200]
    words = re.findall(r'\w+', ' '.join(sentences[::2]).lower())
    characters = sorted(set(''.join(sentences).lower()) - {' '})
    pieces = [*VOCAB[:5], *characters, *(f'##{character}' for character in characters), *words]
    (tmp_path / 'vocab.txt').write_text('\n'.join(dict.fromkeys(pieces)))         # each once
    folder, _ = prepare(tmp_path, sentences, tokenizer=specs[kind], vocab_size=1000)
    chosen = random.Random(1).sample(sentences, 100)
    assert check_masked(kind, prepare_data.load_tokenizer(folder), chosen) > least


@pytest.mark.parametrize('kind', ['sentencepiece', 'wordpiece'])
def test_the_pipeline_of_transformers_fills_in_the_same_words(tmp_path, specs, kind):
    """With random weights, so that any other row of ids would give other words."""
    torch.manual_seed(0)
    folder, meta = prepare(tmp_path, make_texts(100), tokenizer=specs[kind])
    tokenizer = prepare_data.load_tokenizer(folder)
    cls, mask, sep = (tokenizer.special_ids[key] for key in ('cls', 'mask', 'sep'))
    model = transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=meta['vocab_size'], hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, initializer_range=1.0)).eval()
    fill = transformers.pipeline('fill-mask', model, tokenizer=prepare_data.fast_tokenizer(tokenizer, 64))
    for text in ('the [MASK]. red', '[MASK], of', 'walks and [MASK]', 'ri[MASK] over'):
        before, after = tokenizer.encode_parts(text.split('[MASK]'))
        logits = model(torch.tensor([[cls, *before, mask, *after, sep]])).logits[0, 1 + len(before)]
        assert [item['token'] for item in fill(text)] == logits.topk(5).indices.tolist()


def test_a_vocabulary_fits_its_corpus(tmp_path, capfd):
    """A small corpus gets what it has; one of many characters says how many are needed."""
    _, meta = prepare(tmp_path, make_texts(30), vocab_size=4096)
    assert 30 < meta['vocab_size'] < 4096
    assert 'vocab_size=4096 is more than so small a corpus has: it gets' in capfd.readouterr().err
    texts = [chr(0x4e00 + i) * 3 for i in range(80)]
    with pytest.raises(UserError, match='vocab_size=60: the characters of the corpus alone need ') as error:
        prepare(tmp_path, texts, name='y')
    least = int(re.search('need ([0-9]+)', str(error.value))[1])
    _, meta = prepare(tmp_path, texts, name='y', vocab_size=least)
    assert meta['vocab_size'] == least


def test_a_vocabulary_of_another_language_is_said(tmp_path, specs, capfd):
    _, meta = prepare(tmp_path, make_texts(30, pieces=CHINESE[:7]), tokenizer=specs['wordpiece'])
    assert meta['unknown'] > 0.9
    assert '% of the tokens are [UNK]: the vocabulary does not suit it' in capfd.readouterr().err
    _, meta = prepare(tmp_path, make_texts(30), name='y')
    assert meta['unknown'] == 0
    assert '[UNK]' not in capfd.readouterr().err


@pytest.mark.parametrize('files, knob, flag, expected', [
    ({'tokenizer_config.json': {'do_lower_case': False}}, True, False, False),
    ({'tokenizer_config.json': {'model_max_length': 512},
      'tokenizer.json': {'normalizer': {'lowercase': True}}}, False, False, True),
    ({'tokenizer.json': {'normalizer': None}}, False, True, False),
    ({'tokenizer_config.json': {'do_lower_case': False}}, True, True, None),
    ({'tokenizer_config.json': {'do_lower_case': False}}, False, True, False)])
def test_the_files_of_a_bert_say_its_casing(tmp_path, specs, monkeypatch, capfd, files, knob, flag, expected):
    """None: refused."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(sys, 'argv', ['prepare_data.py', *[f'--lower_case={knob}'] * flag])
    usual = {'texts': make_texts(30), 'tokenizer': specs['wordpiece'], 'lower_case': knob}
    if expected is None:
        with pytest.raises(UserError, match='lower_case=True: but by its files .* has False: leave the flag'):
            prepare(tmp_path, **usual)
        return
    _, meta = prepare(tmp_path, **usual)
    assert meta['tokenizer']['lower_case'] == expected
    assert (f'lower_case={expected}, as its files say' in capfd.readouterr().err) == (knob != expected)


def test_a_bert_of_the_hub_says_its_casing(tmp_path, specs, monkeypatch):
    """Its tokenizer_config.json comes beside its vocab.txt; some have no tokenizer.json."""
    (tmp_path / 'tokenizer_config.json').write_text('{"do_lower_case": false}')

    def download(hub_id, name):
        assert hub_id == 'owner/cased'
        if not (tmp_path / name).exists():
            raise huggingface_hub.errors.EntryNotFoundError('404')
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', download)
    _, meta = prepare(tmp_path, make_texts(30), tokenizer='wordpiece:owner/cased')
    assert meta['tokenizer']['lower_case'] is False


# ---- Chinese words ----

@pytest.mark.parametrize('text, cut, tokens', [
    ('我们用BERT模型。', '我们 用 BERT 模型 。', '|我 们 |用 |b ##e ##r ##t |模 型 |。'),
    ('买恤T', '买 恤T', '|买 |恤 |t'), ('买T恤,好模型', '买 T恤 , 好 模型', '|买 |t 恤 |, |好 |模 型'),
    ('b我龘', 'b我龘', '|b 我 [UNK]'), ('我𠮷b䷀', '我 𠮷 b䷀', '|我 |𠮷 |b ##䷀')])
def test_words_of_mixed_text(tmp_path, monkeypatch, text, cut, tokens):
    """jieba decides where a Chinese word starts, the pieces decide for all other text."""
    folder, _ = prepare(tmp_path, ['我们用模型买恤好𠮷bert，。,䷀'], tokenizer='character', val_fraction=1.0)
    monkeypatch.setattr(prepare_data, 'load_jieba', lambda: types.SimpleNamespace(cut=lambda _: cut.split()))
    tokenizer = prepare_data.load_tokenizer(folder)
    (ids, offsets), = tokenizer.encode_offsets([text])
    marks = prepare_data.mark_words(text, ids, offsets, np.array(tokenizer.word_starts()))
    marked = []
    for i, mark in zip(ids, marks, strict=True):
        marked.append('|' + tokenizer.pieces[i] if mark else tokenizer.pieces[i])
    assert ' '.join(marked) == tokens
    assert ids == tokenizer.encode([text])[0]


def test_words_stay_with_their_tokens(tmp_path, capfd, monkeypatch):
    (tmp_path / 'temporary').mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'temporary'))       # where jieba has its cache
    texts = make_texts(60, 0, CHINESE, '') + ['我来到北京清华大学']        # from jieba's README
    usual = {'tokenizer': 'character', 'vocab_size': 100, 'val_fraction': 0.2, 'unit_bytes': 5000}
    folder, meta = prepare(tmp_path, texts, **usual, segmenter='jieba')
    assert not os.listdir(tmp_path / 'temporary')
    assert 'jieba' not in capfd.readouterr().err
    tokenizer = prepare_data.load_tokenizer(folder)
    word_start = np.array(tokenizer.word_starts())
    marks = {}                                                  # ids of a document -> its marks
    for text, (ids, offsets) in zip(texts, tokenizer.encode_offsets(texts), strict=True):
        marks[tuple(ids)] = prepare_data.mark_words(text, ids, offsets, word_start).tolist()
    assert list(map(int, marks[encoded(folder, texts[-1:])[0]])) == [1, 1, 0, 1, 0, 1, 0, 0, 0]
    for split, shards in meta['splits'].items():
        written = b''.join(contents(folder)[shard['stem'] + '.words'] for shard in shards)
        expected = []
        for ids in read_split(folder, meta, split):
            expected += [*marks[ids], 1]                        # and [SEP]
        assert list(written) == expected
    plain, without = prepare(tmp_path, texts, **usual, name='plain')
    assert contents(plain)['train_00000.bin'] == contents(folder)['train_00000.bin']
    assert 'segmenter' not in without
    assert meta['segmenter'] == {'kind': 'jieba'}


# ---- readers ----

def test_rows_without_text_are_counted_by_reason(tmp_path, capfd):
    """The file begins with a byte order mark."""
    good = [json.dumps({'text': text}).encode() for text in make_texts(100)]
    bad = [b'{"text": null, "x": "b"}', b'{"text": 3}', b'{"text": "\xff"}', b'{"text": "cut', b'[1, 2]',
           b'{"title": "x"}', b'{"text": "\\u200b"}']            # the last has no token
    more = [b'', b'{"text": " \\n"}', b'{"text": "a\\ud800b"}']           # a lone surrogate is a '?'
    (tmp_path / 'a.jsonl').write_bytes(b'\xef\xbb\xbf' + b'\n'.join([*good[:50], *bad, *more, *good[50:]]))
    folder, meta = prepare(tmp_path, corpus=str(tmp_path / 'a.jsonl'))
    assert read_all(folder, meta) == sorted(encoded(folder, [*make_texts(100), 'a?b']))
    assert meta['dropped'] == {"rows without text in 'text'": 4, 'rows that are no JSON or no UTF-8': 2,
                               'texts without a token': 1, 'blank rows': 1}     # a blank line is no row
    line, = (line for line in capfd.readouterr().err.splitlines() if 'left out' in line)
    assert "left out: 4 rows without text in 'text', 2 rows that are no JSON or no UTF-8, 1 blank" in line


def test_ranges_of_a_file_have_each_line_once(tmp_path):
    """Edges within lines, between them, within a long one; ranges without the beginning of a line."""
    lines = [json.dumps('é' * (7 * i % 40) + str(i), ensure_ascii=False) for i in range(60)]
    file = tmp_path / 'a.jsonl'
    file.write_text('\n'.join([*lines, json.dumps('x' * 300), '"last"']))
    for edge in range(10, os.path.getsize(file), 7):
        rows = []
        for begin, end in ((0, edge), (edge, edge + 9), (edge + 9, None)):
            rows += prepare_data.read_jsonl(str(file), begin, end, False)
        assert rows == [*map(json.loads, lines), 'x' * 300, 'last'], edge


def test_readers_agree(tmp_path, capfd):
    """The case of a suffix does not matter; files of other kinds are counted."""
    texts = make_texts(40)
    for name in ('plain', 'gz/deep', 'txt/deep', 'zst', 'parquet'):
        (tmp_path / name).mkdir(parents=True)
    data = pathlib.Path(write_jsonl(tmp_path / 'plain' / 'c4-train.00000-of-01024.json', texts)).read_bytes()
    half = data.index(b'\n', len(data) // 2) + 1
    frames = [zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])]
    (tmp_path / 'zst' / 'a.ndjson.zst').write_bytes(b''.join(frames))
    for name in ('notes.csv', 'b.CSV', 'c.pdf'):
        (tmp_path / 'plain' / name).write_text('of no use')
    (tmp_path / 'gz' / 'deep' / 'a.JSONL.GZ').write_bytes(gzip.compress(data))
    for i in range(2):
        rows = pyarrow.table({'n': range(20), 'text': texts[20 * i:20 * i + 20]})
        pyarrow.parquet.write_table(rows, tmp_path / 'parquet' / f'{i}.parquet')
    for i, text in enumerate(texts):
        suffix = ('.txt', '', '.TXT', '.md')[i % 4]
        (tmp_path / 'txt' / 'deep' / f'{i}{suffix}').write_text(text)
    for source in ('plain', 'p*n/*.json', 'gz', 'gz/**/*.GZ', 'zst/a.ndjson.zst', 'parquet', 'txt'):
        name = source.replace('/', '_').replace('*', '')
        folder, meta = prepare(tmp_path, corpus=str(tmp_path / source), name=name, unit_bytes=2000)
        assert read_all(folder, meta) == sorted(encoded(folder, texts)), name
        assert len(meta['splits']['val']) > 1 or source not in ('plain', 'parquet', 'txt')
        not_read = f'{tmp_path}/plain: not read: 2 .csv, 1 .pdf\n'
        assert (not_read in capfd.readouterr().err) == (source == 'plain')


def test_each_file_once(tmp_path):
    """A link to the folder itself, of which two would give 2^40 paths; to a file; hidden files."""
    deep = tmp_path / 'texts' / 'deep'
    deep.mkdir(parents=True)
    for name in ('b.txt', '.hidden.txt', 'notes.csv'):
        (deep / name).write_text('text')
    (tmp_path / 'texts' / '.git').mkdir()
    (tmp_path / 'texts' / '.git' / 'c.txt').write_text('text')
    (deep / 'again').symlink_to(tmp_path / 'texts')
    (tmp_path / 'texts' / 'z.txt').symlink_to(deep / 'b.txt')
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'elsewhere' / 'a.txt').write_text('text')
    (tmp_path / 'texts' / 'link').symlink_to(tmp_path / 'elsewhere')
    (deep / 'once more').symlink_to(tmp_path / 'texts')
    files, others = prepare_data.find_files(str(tmp_path / 'texts'))
    assert [os.path.relpath(file, tmp_path / 'texts') for file in files] == ['deep/b.txt', 'link/a.txt']
    assert [os.path.relpath(file, tmp_path / 'texts') for file in others] == ['deep/notes.csv']
    for pattern in ('texts/*/[ab].txt', 'texts/**/[ab].txt', '**/te*/**/*.txt', 'texts/**'):
        assert prepare_data.find_files(f'{tmp_path}/{pattern}')[0] == files, pattern


@pytest.mark.parametrize('data, texts', [
    (b'\xef\xbb\xbfone\n\ntwo', ['one\n\ntwo']),
    (b'one \xc3\xa9', ['one \xe9']),
    (b'one \xef\xbf\xbd', ['one \ufffd']),
    (b'one \xe9', [b'one \xe9'])])
def test_a_text_file(tmp_path, data, texts):
    """A byte order mark is no part of a text, U+FFFD may be; what is not UTF-8 stays bytes: no text."""
    (tmp_path / 'a.txt').write_bytes(data)
    assert list(prepare_data.read_txt(str(tmp_path / 'a.txt'), 0, None, False)) == texts


def test_documents_between_blank_lines(tmp_path):
    """As CLUECorpusSmall: each document once and in order; one that is not UTF-8 is left out."""
    texts = [text.replace(' ', '\n') for text in make_texts(60)]
    for k in range(3):
        (tmp_path / f'{k}.txt').write_bytes(
            b'\n' * k + '\n \n\n'.join(texts[20 * k:20 * k + 20]).encode() + b'\n\n\xff\n')
    folder, meta = prepare(tmp_path, corpus='cluecorpussmall', path=str(tmp_path), tokenizer='character')
    assert read_all(folder, meta) == sorted(encoded(folder, texts))
    assert meta['dropped'] == {'rows that are no JSON or no UTF-8': 3}


def unit_of(tmp_path, rows, **changes):
    """A unit of records in a .jsonl file."""
    (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return {'hub': None, 'pieces': [[str(tmp_path / 'rows.jsonl'), 0, None]], 'joined': None, 'corpus': '',
            'field': 'text', 'documents': 0, **changes}


@pytest.mark.parametrize('name', ['a.json', 'a.json.gz'])
@pytest.mark.parametrize('indent', [None, 1])
def test_an_array_of_records(tmp_path, name, indent):
    """A .json file may be one JSON value; it is not cut, even if it is larger than a unit."""
    rows = [{'text': text} for text in make_texts(40)]
    data = b'\xef\xbb\xbf ' + json.dumps([*rows, {'text': None}], indent=indent).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith('.gz') else data)
    folder, meta = prepare(tmp_path, corpus=str(tmp_path / name), tokenizer='character', unit_bytes=100)
    assert read_all(folder, meta) == sorted(encoded(folder, make_texts(40)))
    assert sum(meta['dropped'].values()) == 1
    assert len(meta['splits']['val']) == 1


def test_a_json_of_one_object(tmp_path):
    """Over many lines it is one row; many of them are refused."""
    (tmp_path / 'texts').mkdir()
    for i, text in enumerate(make_texts(30)):
        (tmp_path / 'texts' / f'{i}.json').write_text(json.dumps({'text': text}, indent=2))
    usual = {'corpus': str(tmp_path / 'texts'), 'tokenizer': 'character'}
    folder, meta = prepare(tmp_path, **usual)
    assert read_all(folder, meta) == sorted(encoded(folder, make_texts(30)))
    (tmp_path / 'texts' / '7.json').write_text('{\n "text": "a"\n}\n{\n "text": "b"\n}\n')
    with pytest.raises(UserError, match='7.json: cannot be read: Extra data: line 4'):
        prepare(tmp_path, **usual, name='y')


@pytest.mark.parametrize('val_fraction', [0.1, 1])
@pytest.mark.parametrize('name, data, reason', [
    ('a.jsonl', b'{\n "text":\n 3\n}\n', '3 rows that are no JSON or no UTF-8, 1 rows without text'),
    ('a.json', b'{\n "text":\n 3\n}\n', "1 rows without text in 'text'"),
    ('a.txt', 'one two'.encode('utf-16'), '1 rows that are no JSON or no UTF-8'),
    ('a.jsonl', b'', 'nothing')])
def test_a_corpus_without_text_is_one_line(tmp_path, val_fraction, name, data, reason):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=f'no document in the corpus.*; left out: {reason}'):
        prepare(tmp_path, corpus=str(tmp_path / name), val_fraction=val_fraction)


@pytest.mark.parametrize('joined, documents', [
    ('^ = [^=]', [' = A = \none\n = = s = = ', ' = B = \ntwo']),
    (2, [' = A = \none', ' = = s = = \n = B = ', 'two']), (9, [' = A = \none\n = = s = = \n = B = \ntwo'])])
def test_rows_are_joined(tmp_path, joined, documents):
    rows = [{'text': text} for text in (' = A = \n', '', 'one\n', ' = = s = = \n', ' = B = \n', None, 'two')]
    unit, dropped = unit_of(tmp_path, rows, joined=joined), prepare_data.Counter()
    assert list(prepare_data.unit_texts(unit, '', dropped)) == documents
    assert dropped.total() == 1


def test_oscar_filter_on_both_schemas(tmp_path):
    english = {'identification': {'label': 'en', 'prob': 0.9}}
    passes = [{}, {'annotation': None}, {'harmful_pp': 5.0, 'categories': ['blog']},
              {'harmful_pp': None, 'quality_warnings': None, 'categories': None}]
    fails = [{'annotation': ['tiny']}, {'quality_warnings': ['header']}, {'harmful_pp': 4.9},
             {'harmful_pp': 100_001.0}, {'identification': {'label': 'fr'}}]
    fails += [{'categories': ['blog', blocked]} for blocked in (
        'agressif', 'adult', 'cryptojacking', 'dangerous_material', 'phishing', 'warez', 'ddos', 'hacking',
        'malware', 'mixed_adult', 'sect')]
    rows = [{'content': str(more), 'metadata': english | more} for more in passes + fails]
    unit = unit_of(tmp_path, [*rows, {'content': 'x', 'metadata': None}], corpus='oscar', field='content')
    dropped = prepare_data.Counter()
    texts = prepare_data.unit_texts(unit, '', dropped)
    assert list(texts) == list(map(str, passes))
    assert dropped.total() == len(fails) + 1


def test_docstrings_of_a_package(tmp_path, monkeypatch):
    """In the order of the files, of the statements by depth; each once; the package is not imported."""
    text = 'A sentence that is long enough to be kept, number {}.'.format
    files = {'__init__.py': f'"""{text(1)}"""\nclass A:\n    """{text(2)}\n\n    more\n    """\n'
                            f'    async def f(self):\n        """{text(1)}"""\n        """{text(9)}"""\n',
             'b.py': f'raise OSError\nif x:\n    def f():\n        "{text(3)}"\n'
                     f'add_newdoc("a", "b", """{text(4)}{text(5)}""")\nf = lambda: 1\ndef g():\n    "short"',
             'deep/a.py': f'"""{text(6)}"""', 'c.py': 'def broken(:\n'}
    (tmp_path / 'tinypackage' / 'deep').mkdir(parents=True)
    for name, content in files.items():
        (tmp_path / 'tinypackage' / name).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder, meta = prepare(tmp_path, path='tinypackage', val_fraction=0.7, text_field='body',
                           tokenizer='character')
    lines = [json.loads(line) for line in contents(folder)['docstrings.jsonl'].splitlines()]
    assert {line['package'] for line in lines} == {'tinypackage'}
    assert 'tinypackage' not in sys.modules
    assert [(line['where'].removeprefix('tinypackage/'), line['text']) for line in lines] == [
        ('__init__.py:1', text(1)), ('__init__.py:3', text(2) + '\n\nmore'), ('b.py:5', text(4) + text(5)),
        ('b.py:4', text(3)), ('deep/a.py:1', text(6))]
    assert len(read_all(folder, meta)) == 5


def test_units_of_the_hub(tmp_path, monkeypatch):
    """Row groups where files are few, but whole files where rows are joined; the revision is pinned."""
    rows = [text if i % 6 else f' = {i} = ' for i, text in enumerate([None, *make_texts(59)], 1)]
    files = [str(tmp_path / f'{k}.parquet') for k in range(2)]
    local = datasets.load_dataset
    asked = []
    for file in files:
        pyarrow.parquet.write_table(pyarrow.table({'text': rows}), file, row_group_size=20)

    def load_dataset(name, subset, split, streaming, revision):
        asked.append((name, subset, split, revision))
        return local('parquet', data_files=files, split=split, streaming=streaming)

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info',
                        lambda self, name, revision: types.SimpleNamespace(sha=f'{revision}123'))
    folder, meta = prepare(tmp_path, corpus='books+wikipedia', name='')
    assert asked == [('SamuelYang/bookcorpus', None, 'train', 'main123'),
                     ('wikimedia/wikipedia', '20231101.en', 'train', 'main123')]
    assert meta['name'] == 'books_wikipedia'
    assert sum(meta['dropped'].values()) == 4
    assert len(meta['splits']['val']) == 2 + 6                          # units
    assert len(read_all(folder, meta)) == 2 * 1 + 2 * 59                # joined rows: a document a file
    folder, meta = prepare(tmp_path, corpus='wikitext', name='joined', val_fraction=0.3)
    assert len(meta['splits']['val']) == 2
    assert len(read_all(folder, meta)) == 2 * 11        # no article is cut
    monkeypatch.setattr(huggingface_hub.HfApi, 'dataset_info', lambda self, name, revision: 1 / 0)
    with pytest.raises(UserError, match='owner/name: no file here, and cannot be read from the hub; with'):
        prepare(tmp_path, corpus='owner/name', name='other')


# ---- units, parts and plans ----

def jsonl_files(folder):
    """Files of several sizes, rows without text among them; one is empty, one without any text."""
    (folder / 'files' / 'deep').mkdir(parents=True)
    for k in range(4):
        write_jsonl(folder / 'files' / f'{k}.jsonl', [*make_texts(70 * k, seed=k), None, '', 3])
    (folder / 'files' / '5.jsonl').write_bytes(b'')
    packed = gzip.compress(pathlib.Path(write_jsonl(folder / '9.jsonl', make_texts(80, seed=9))).read_bytes())
    (folder / 'files' / 'deep' / '0.jsonl.gz').write_bytes(packed)
    return {'corpus': str(folder / 'files'), 'unit_bytes': 4000, 'val_fraction': 0.2}


def test_any_number_of_parts_and_processes(tmp_path, capfd):
    usual = jsonl_files(tmp_path)
    reference = contents(prepare(tmp_path / 'one', **usual)[0])
    assert 'unit_00009.json' in reference
    assert not any(name.endswith('.tmp') for name in reference)
    assert contents(prepare(tmp_path / 'two processes', num_proc=2, **usual)[0]) == reference
    for i in (0, 2, 1):
        folder = prepare_data.prepare(knobs(tmp_path / 'parts', part=f'{i}/3', **usual))
        assert os.path.exists(f'{folder}/meta.json') == (i == 1)
    assert contents(folder) == reference
    assert 'part 2/3 is done; other parts have ' in capfd.readouterr().err


def test_launchers_number_the_parts_which_wait_for_part_0(tmp_path, monkeypatch, capfd):
    assert prepare_data.find_part(knobs(tmp_path)) == (0, 1)
    for rank, world, part in (('SLURM_PROCID', 'SLURM_NTASKS', '2/5'), ('RANK', 'WORLD_SIZE', '1/3')):
        monkeypatch.setenv(rank, part[0])
        monkeypatch.setenv(world, part[2])
        assert prepare_data.find_part(knobs(tmp_path)) == (int(part[0]), int(part[2]))
    usual = jsonl_files(tmp_path)
    monkeypatch.setattr(time, 'sleep', lambda _: prepare_data.prepare(knobs(tmp_path, part='0/2', **usual)))
    prepare(tmp_path, part='1/2', **usual)
    said, = (line for line in capfd.readouterr().err.splitlines() if 'part 1/2 waits' in line)
    assert said.endswith('which part 0 makes; if that has failed, repeat it')


def test_a_plan_is_kept_or_begun_again(tmp_path):
    """Other knobs are refused; without units.json all is made anew, whatever lies there."""
    usual = jsonl_files(tmp_path)
    folder, _ = prepare(tmp_path, **usual)
    before = contents(folder)
    write_jsonl(tmp_path / 'files' / '9.jsonl', make_texts(10))         # not of this plan
    assert contents(prepare(tmp_path, **usual, num_proc=2)[0]) == before
    with pytest.raises(UserError, match='begun with vocab_size=60, now vocab_size=50: .*/units.json'):
        prepare(tmp_path, **usual, vocab_size=50)
    os.remove(f'{folder}/units.json')
    pathlib.Path(folder, 'mine.txt').write_text('a file of mine')
    again, _ = prepare(tmp_path, **usual, vocab_size=50)
    other, _ = prepare(tmp_path / 'other', **usual, vocab_size=50)
    assert contents(again) == {**contents(other), 'mine.txt': b'a file of mine'}


def test_two_commands_do_not_prepare_one_part(tmp_path):
    usual = {**jsonl_files(tmp_path), 'tokenizer': 'character'}
    folder = str(tmp_path / 'data' / 'x')
    with (prepare_data.lock_folder(folder, 'lock_0'),
          pytest.raises(UserError, match='x: another run uses it: end that one')):
        prepare_data.prepare(knobs(tmp_path, **usual))
    assert os.listdir(folder) == ['lock_0']
    prepare_data.prepare(knobs(tmp_path, part='0/2', **usual))
    with prepare_data.lock_folder(folder, 'lock_0'):            # of another part
        prepare(tmp_path, part='1/2', **usual)


@pytest.mark.parametrize('val_fraction, small', [(1e-9, 'val'), (1 - 1e-9, 'train')])
def test_no_split_is_empty(tmp_path, val_fraction, small):
    """The document whose hash is nearest moves there; the same with two parts. Of one text nothing can."""
    texts = make_texts(12)
    hashes = {prepare_data.text_hash(text, prepare_data.HASH_SEED): text for text in texts}
    nearest = hashes[min(hashes) if small == 'val' else max(hashes)]
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', texts), 'val_fraction': val_fraction,
             'tokenizer': 'character', 'unit_bytes': 500}
    folder, meta = prepare(tmp_path, **usual)
    assert read_split(folder, meta, small) == encoded(folder, [nearest])
    assert len(read_all(folder, meta)) == 12
    for i in range(2):
        other = prepare_data.prepare(knobs(tmp_path, part=f'{i}/2', **{**usual, 'name': 'y'}))
    assert prepare_data.load_meta(other)['identity'] == meta['identity']
    with pytest.raises(UserError, match='one document in the corpus, two that differ are needed'):
        prepare(tmp_path, ['red'] * 3, val_fraction=val_fraction, tokenizer='character', name='z')


def test_a_single_text_file_is_cut_at_blank_lines(tmp_path):
    """Of several files each is a document."""
    texts = make_texts(30)
    for name, count in (('one', 1), ('two', 2)):
        (tmp_path / name).mkdir()
        for k in range(count):
            (tmp_path / name / f'{k}.txt').write_text('\n \n'.join(texts[k::count]) + '\n')
    for name in ('one', 'one/0.txt'):
        usual = {'corpus': f'{tmp_path}/{name}', 'name': name.replace('/', '_'), 'tokenizer': 'character'}
        folder, meta = prepare(tmp_path, **usual)
        assert read_all(folder, meta) == sorted(encoded(folder, texts))
    folder, meta = prepare(tmp_path, corpus=f'{tmp_path}/two', name='y', tokenizer='character')
    assert len(read_all(folder, meta)) == 2


def test_max_documents_are_the_first_of_each_unit(tmp_path):
    folder, meta = prepare(tmp_path, [None, *make_texts(300)], unit_bytes=10_000, max_documents=50)
    direct, prepared = encoded(folder, make_texts(300)), read_all(folder, meta)
    n_units = len(meta['splits']['val'])
    assert len(prepared) == n_units * math.ceil(50 / n_units)
    assert set(prepared) < set(direct)
    assert direct[0] in prepared
    assert sum(meta['dropped'].values()) == 1


def test_a_sample_is_of_the_whole_corpus(tmp_path):
    """Texts of smallest hash of the first of each unit, by its bytes: with them what is held out of these."""
    units = [unit_of(tmp_path, [], bytes=size) for size in (1000, 3000)]
    for k, unit in enumerate(units):
        file = write_jsonl(tmp_path / f'{k}.jsonl', [f'{k} {i:098}' for i in range(500)])
        unit['pieces'] = [[file, 0, None]]
    sample = prepare_data.take_sample(units, '', 1200)
    assert [text[0] for text in sample] == ['0'] * 3 + ['1'] * 9

    def hash_of(text):
        return prepare_data.text_hash(text, prepare_data.HASH_SEED)

    read = [[f'{k} {i:098}' for i in range(count)] for k, count in enumerate((30, 90))]
    assert sample == sorted(read[0], key=hash_of)[:3] + sorted(read[1], key=hash_of)[:9]
    held_out = {text for text in read[0] + read[1] if hash_of(text) < 0.05 * 2**64}
    assert held_out
    assert held_out <= set(sample)


# ---- mistakes and damage ----

@pytest.mark.parametrize('arguments, said', [
    ('--corpus=nowhere.jsonl', "corpus='nowhere.jsonl': no such file; choose one of docstrings"),
    ('--corpus=good.jsonl --val_fraction=0', 'val_fraction=0.0: must be above 0 and at most 1'),
    ('--corpus=good.jsonl --tokenizer=wordpeice', "tokenizer='wordpeice': choose one of sentencepiece"),
    ('--corpus=good.jsonl --tokenizer=google-bert/bert-base-uncased',
     "tokenizer='google-bert/bert-base-uncased': choose one of sentencepiece, wordpiece, character"),
    ('--corpus=good.jsonl --tokenizer=texts', 'texts: not prepared: run python prepare_data.py --corpus=FIL'),
    ('--corpus=lines.txt', 'two that differ are needed (a single .txt file is cut at blank lines)'),
    ('--check=data/wikitext', 'run python prepare_data.py config/data/wikitext.py'),
    ('--corpus=cluecorpussmall', 'needs --path='),
    ('--corpus=good.jsonl --text_field=body', "text_field='body': the first row has id, text"),
    ('--corpus=good.jsonl --vocab_size=9', 'vocab_size=9: the characters of the corpus alone need '),
    ('--corpus=good.jsonl --tokenizer=wordpiece:no_mask.txt', 'tokenizer/vocab.txt: no line is [MASK]'),
    ('--corpus=good.jsonl --tokenizer=sentencepiece:good.jsonl', "tokenizer='sentencepiece:good.jsonl': "),
    ('--corpus=good.jsonl --tokenizer=character:no.txt', 'no.txt'),
    ('--corpus=good.jsonl --segmenter=jieba', "segmenter='jieba': must be jieba, with tokenizer=wordpiece"),
    ('--corpus=cut.jsonl.gz', 'cut.jsonl.gz: cannot be read: '),
    ('--path=nosuchpackage', "'nosuchpackage' is"),
    ('--corpus=good.jsonl --part=4/4', "part='4/4': must be i/n with i from 0 to n - 1, as in 0/4"),
    ('--corpus=texts --data_dir=.', './texts has the corpus, and the result would be put there: give'),
    ('--check=texts', 'texts: not prepared: run python prepare_data.py --corpus=FILES --name=texts')])
def test_mistakes_are_one_line(tmp_path, monkeypatch, stage, arguments, said):
    """And leave nothing behind that a corrected command would trip over."""
    monkeypatch.chdir(tmp_path)
    good = write_jsonl('good.jsonl', make_texts(30))
    pathlib.Path('cut.jsonl.gz').write_bytes(gzip.compress(pathlib.Path(good).read_bytes())[:-20])
    pathlib.Path('no_mask.txt').write_text('[PAD]\n[UNK]\n[CLS]\n[SEP]\n')
    pathlib.Path('lines.txt').write_text('\n'.join(make_texts(30)))
    os.mkdir('texts')
    shutil.copy(good, 'texts/mine.jsonl')
    done = stage('prepare_data', '--num_proc=1', *arguments.split())
    lines = [line for line in done.err.splitlines() if not re.search(' units of | is trained on ', line)]
    assert said in refused(done._replace(err='\n'.join(lines)))
    assert os.listdir('texts') == ['mine.jsonl']
    assert not glob.glob('data/*/*.json')


@pytest.mark.parametrize('tokenizer', ['sentencepiece', 'character'])
def test_a_damaged_corpus_is_no_mistake_of_the_tokenizer(tmp_path, tokenizer):
    """The damage is behind the first row, so that it is met while the tokenizer is trained."""
    data = pathlib.Path(write_jsonl(tmp_path / 'a.jsonl', make_texts(3000))).read_bytes()
    file = tmp_path / 'cut.jsonl.gz'
    file.write_bytes(gzip.compress(data)[:-20])
    with pytest.raises(UserError, match=f'^{file}: cannot be read: '):
        prepare(tmp_path, corpus=str(file), tokenizer=tokenizer)
    sound, _ = prepare(tmp_path, make_texts(30), tokenizer='character')
    flip(f'{sound}/tokenizer/vocab.txt')
    with pytest.raises(UserError, match=f'^{sound}/tokenizer/vocab.txt: missing, damaged'):
        prepare(tmp_path, make_texts(30), tokenizer=sound, name='y')


def test_a_config_is_called_as_the_corpus_that_it_prepares():
    """As load_meta names it where the corpus is missing."""
    for file in glob.glob(f'{ROOT}/config/data/*.py'):
        config = configure(dict(vars(prepare_data)), prepare_data.MINIMUM, [file, '--path=files'])
        assert file.endswith(f"/data/{config['name'] or prepare_data.find_corpus(config)[0]}.py")


@pytest.fixture(scope='module')
def sound(tmp_path_factory):
    """(folder of data/x, knobs) of a prepared corpus of several units, with words."""
    home = tmp_path_factory.mktemp('sound')
    usual = {'tokenizer': 'character', 'segmenter': 'jieba', 'unit_bytes': 3000, 'val_fraction': 0.3}
    prepare(home, make_texts(60, 0, CHINESE, ''), **usual)
    return home, {**usual, 'corpus': str(home / 'a.jsonl')}


def copied(sound, tmp_path):
    return pathlib.Path(shutil.copytree(sound[0] / 'data', tmp_path / 'data')) / 'x'


def test_check_covers_every_file_and_names_what_mends_it(sound, tmp_path, stage):
    """The line names one file; without it, the command that prepared the corpus makes the same bytes."""
    home, reference = copied(sound, tmp_path), contents(sound[0] / 'data' / 'x')
    assert stage('prepare_data', f'--check={home}').err == f'{home}: all files are as they were written\n'
    names = [name for name in reference if '0000' not in name or '00001' in name]
    assert len(names) == 12
    assert {'units.json', 'tokenizer/vocab.txt', 'unit_00001.json'} < set(names)
    for name in names:
        flip(home / name)
        line = refused(stage('prepare_data', f'--check={home}'))
        if name != 'meta.json':                                 # which may have another file's sum changed
            assert f'{home}/{name}: ' in line
        assert f': missing, damaged or of another version: remove {home}/' in line
        removed = line.partition(': remove ')[2].partition(' and ')[0]
        os.remove(f'{home}/meta.json' if name == 'meta.json' else removed)
        assert contents(prepare(tmp_path, **sound[1])[0]) == reference, name


def test_a_run_checks_what_it_reads(sound, tmp_path):
    """Sizes, and the tokenizer's files."""
    home = copied(sound, tmp_path)
    meta = prepare_data.load_meta(str(home))
    for name, change in (('train_00000.bin', lambda data: data[:-1]), ('train_00002.words', lambda data: b''),
                         ('val_00001.idx', lambda data: data + b'\0'),
                         ('tokenizer/word_start.bin', lambda data: b'\2' + data[1:])):
        prepare_data.check_corpus(str(home), meta)
        whole = (home / name).read_bytes()
        (home / name).write_bytes(change(whole))
        with pytest.raises(UserError, match=f'{name}: missing, damaged'):
            prepare_data.check_corpus(str(home), meta)
        (home / name).write_bytes(whole)
    os.remove(home / 'val_00001.bin')
    with pytest.raises(UserError, match='val_00001.bin: missing, damaged'):
        prepare_data.check_corpus(str(home), meta)


def test_a_folder_of_an_earlier_revision_goes_on(sound, tmp_path):
    """Its .json have a checksum as last key: done units stay, a lost one is made."""
    home = copied(sound, tmp_path)
    for file in [home / 'units.json', home / 'tokenizer' / 'settings.json', *home.glob('unit_*.json')]:
        value = json.loads(file.read_text())
        file.write_text(json.dumps({**value, 'checksum': prepare_data.digest_of(value)}, indent=1) + '\n')
    (home / 'meta.json').unlink()
    (home / 'unit_00001.json').unlink()
    before = (home / 'unit_00000.json').stat().st_mtime_ns
    _, meta = prepare(tmp_path, **sound[1])
    assert meta['identity'] == prepare_data.load_meta(str(sound[0] / 'data' / 'x'))['identity']
    assert (home / 'unit_00000.json').stat().st_mtime_ns == before


def test_a_killed_worker_is_one_line():
    with pytest.raises(UserError, match='a worker process was killed, .*: repeat the command'):
        prepare_data.in_parallel(os._exit, [(9,), (9,)], 2)


def test_a_damaged_tokenizer_of_a_run_is_named_alone(sound, tmp_path):
    """The folder of a run holds checkpoints: nothing tells a person to remove it."""
    prepare_data.copy_tokenizer(prepare_data.load_tokenizer(str(sound[0] / 'data' / 'x')), str(tmp_path))
    for name in ('vocab.txt', 'settings.json'):
        flip(tmp_path / 'tokenizer' / name)
        with pytest.raises(UserError, match=f'tokenizer/{name}: missing or damaged: copy it from the corpus'):
            prepare_data.load_tokenizer(str(tmp_path))


def test_a_file_is_replaced_once_it_is_complete(tmp_path):
    file = tmp_path / 'a.bin'
    prepare_data.write_bytes(file, b'old')
    with prepare_data.replacing(file) as new:
        new.write(b'new')
        assert file.read_bytes() == b'old'
    assert file.read_bytes() == b'new'
    assert os.listdir(tmp_path) == ['a.bin']


@pytest.mark.parametrize('number', range(1, 9))
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, number):
    """The disk is full at the n-th time that a file is synced; the repeated command goes on."""
    file = write_jsonl(tmp_path / 'a.jsonl', make_texts(60))
    usual = {'corpus': file, 'tokenizer': 'character', 'unit_bytes': 3000}
    synced = []

    def fsync(file):
        synced.append(file)
        if len(synced) == number:
            raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(os, 'fsync', fsync)
    with pytest.raises((OSError, UserError), match='No space left on device'):
        prepare(tmp_path, **usual)
    assert not list(tmp_path.rglob('*.tmp'))
    folder, _ = prepare(tmp_path, **usual)
    undisturbed, _ = prepare(tmp_path / 'other', **usual)
    assert contents(folder) == contents(undisturbed)


# ---- real processes ----

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """(words of the command line, contents of the folder that it prepares)."""
    home = tmp_path_factory.mktemp('undisturbed')
    (home / 'source').mkdir()
    for k in range(4):
        write_jsonl(home / 'source' / f'{k}.jsonl', [*make_texts(1500, seed=k), None])
    line = ['prepare_data.py', *words(corpus=home / 'source', name='x', tokenizer='character', num_proc=2,
                                      val_fraction=0.1, tokenizer_sample=100_000, unit_bytes=30_000)]
    assert process(*line, f'--data_dir={home}').code == 0
    return line, contents(home / 'x')


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize('units', [1, 5, 20])
def test_killed_and_repeated(tmp_path, undisturbed, number, units):
    """The units that were done stay as they are; workers end with their parent."""
    line, reference = undisturbed
    started = launch(*line, f'--data_dir={tmp_path}')
    while started.poll() is None and len(glob.glob(f'{tmp_path}/x/unit_0*.json')) < units:
        time.sleep(0.001)
    os.kill(started.pid, number)
    assert 'Traceback' not in started.communicate(timeout=60)[1]
    assert started.returncode != 0
    with pytest.raises(ProcessLookupError):                     # the workers are gone, too
        for _ in range(200):
            os.killpg(started.pid, 0)
            time.sleep(0.05)
    done = {item: os.stat(item).st_mtime_ns for item in glob.glob(f'{tmp_path}/x/unit_0*.json')}
    assert process(*line, f'--data_dir={tmp_path}').code == 0
    assert {name: data for name, data in contents(tmp_path / 'x').items() if '.tmp' not in name} == reference
    assert done == {item: os.stat(item).st_mtime_ns for item in done}


@pytest.mark.slow
def test_torchrun_prepares_parts(tmp_path, undisturbed):
    """The processes start at once; part 0 makes the plan."""
    line, reference = undisturbed
    assert torchrun(*line, f'--data_dir={tmp_path}').code == 0
    assert contents(tmp_path / 'x') == reference
