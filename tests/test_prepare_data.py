"""prepare_data.py: the same bytes from any reader, process and part; no unit lost, no text in both splits."""
import contextlib
import glob
import gzip
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
import types
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import scipy.stats
import sentencepiece
import tiktoken
import transformers
import zstandard
from conftest import flip, knobs_of, launch, process, words
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

import prepare_data
from configurator import UserError
from prepare_data import (TOKENIZER, bert_tokenizer, encoding_digest, fast_tokenizer, load_tokenizer,
                          open_tokenizer)

DEFAULTS = knobs_of(prepare_data)
text_hash = partial(prepare_data.text_hash, seed=1)
refuses = partial(pytest.raises, UserError)
WORDS = ['red', 'green', 'blue', 'small', 'large', 'quick', 'slow', 'river', 'mountain', 'house', 'walks',
         'sings', 'reads', 'under', 'over', 'the', 'of', 'and', '[MASK]']
VOCAB = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '[', ']', 'mask', 'the', 'of', 'and', 'red', 'ri',
         '##ver', 'walks']
CHINESE = ['宝玉', '林妹妹', '我们', '的', '北京', '来到', 'T恤', 'models', 'Éa', '２０', 'ＡＢ', '，',
           '。“', ' ', '\u3000\u3000', '\r\n', '\u200b', '𠮷', '䷀', 'は', '~~', '[MASK]']


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(os, 'fsync', lambda file: None)


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
    file.write_text(''.join(json.dumps({'id': 1, 'text': text}) + '\n' for text in texts))
    return str(file)


def read_split(folder, meta, split):
    """The documents of a split as tuples of ids without [SEP]; checks the .idx files on the way."""
    documents = []
    for shard in meta['splits'][split]:
        stem = f"{folder}/{shard['stem']}"
        ids = np.fromfile(f'{stem}.bin', meta['dtype'])
        edges = np.fromfile(f'{stem}.idx', '<i8')
        # each document ends with [SEP], which is nowhere else
        ends = np.flatnonzero(ids == meta['special']['sep']) + 1
        assert edges.tolist() == [0, *ends]
        assert edges[-1] == len(ids) == shard['tokens']
        assert len(ends) == shard['documents']
        documents += [tuple(ids[begin:end - 1].tolist()) for begin, end in itertools.pairwise(edges)]
    return documents


def units_of(place, **changes):
    config = {**DEFAULTS, 'corpus': str(place), **changes}
    return prepare_data.make_units(prepare_data.find_corpus(config)[1], None, config)


def unit_texts(place, **changes):
    """The documents of each unit of a corpus, and a Counter of the rows that gave none."""
    dropped = Counter()
    return [list(prepare_data.read_documents(unit, dropped)) for unit in units_of(place, **changes)], dropped


def read_all(folder, meta):
    return sorted(read_split(folder, meta, 'train') + read_split(folder, meta, 'val'))


def entropy_of(documents):
    return pytest.approx(scipy.stats.entropy(np.bincount(np.concatenate(documents))), rel=1e-12)


def encoded(folder, texts):
    return [tuple(ids.tolist()) for ids in load_tokenizer(folder).encode(texts)]


def contents(folder):
    """{path within a folder: bytes} of all files but those that a kill leaves behind."""
    files = [item for item in Path(folder).rglob('*.*') if item.suffix != '.tmp']
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """{kind of tokenizer: the knob}; the names of tiktoken are a small encoding without a network."""
    (tmp_path / 'vocab.txt').write_text('\n'.join(VOCAB) + '\n')
    tokens = [*(bytes([i]) for i in range(256)), b' t', b'he', b'\x80\x81']      # the last is no UTF-8
    ranks = {token: i for i, token in enumerate(tokens)}
    pattern = r' ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+'
    small = {'name': 'small', 'pat_str': pattern, 'mergeable_ranks': ranks, 'special_tokens': {'<end>': 300}}
    assert tiktoken.list_encoding_names()
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, 'small', lambda: small)
    make_library('bytes', make_texts(99), VOCAB[:5]).save(f'{tmp_path}/bytes.json')
    return {**{kind: kind for kind in TOKENIZER}, 'library': f'library:{tmp_path}/bytes.json',
            'wordpiece': f'wordpiece:{tmp_path}/vocab.txt', 'tiktoken': 'tiktoken:small'}


# ---- tokenizers ----

@pytest.mark.parametrize('kind', TOKENIZER)
def test_every_document_once_in_order_and_its_ids(tmp_path, specs, kind, monkeypatch):
    """Then the same texts as a validation corpus with that tokenizer, and in pieces of seven characters."""
    texts = [*make_texts(300), *20 * ['我们来到北京'], 'the red [MASK] riverv\x0cer \u3000\n']
    folder, meta = prepare(tmp_path, texts, tokenizer=specs[kind], unit_bytes=10_000)
    direct = encoded(folder, texts)
    held_out = [text_hash(text) < 0.1 * 2**64 for text in texts]
    assert len(meta['splits']['val']) > 3
    assert read_split(folder, meta, 'val') == list(itertools.compress(direct, held_out))
    train = read_split(folder, meta, 'train')
    assert train == list(itertools.compress(direct, np.logical_not(held_out)))
    assert meta['unigram_entropy'] == entropy_of(train)

    tokenizer = load_tokenizer(folder)
    special_ids = tokenizer.special_ids
    first = 301 if kind == 'tiktoken' else 0                    # after the ids of its own special tokens
    assert sorted(special_ids.values()) == list(range(first, first + len(special_ids)))
    assert tokenizer.pieces[special_ids['mask']] == '[MASK]'
    assert not set(direct[-1]) & set(special_ids.values())      # "[MASK]" in a text is text
    tokens = sum(train, ())
    assert meta['unknown'] == pytest.approx(tokens.count(special_ids.get('unk')) / len(tokens))
    starts = np.fromfile(f'{folder}/tokenizer/word_start.bin', bool)
    assert len(starts) == meta['vocab_size']
    assert starts[[*special_ids.values()]].all()
    n_starts = [starts[[*ids]].sum() for ids in encoded(folder, [' the red river walks', '我们来到北京'])]
    assert n_starts == [4, 7 if kind == 'sentencepiece' else 6]         # its first piece there is a space

    monkeypatch.setattr(prepare_data, 'BATCH', 7)
    folder, other = prepare(tmp_path, texts, tokenizer=folder, lower_case=False, val_fraction=1.0, name='ptb',
                            unit_bytes=3000)
    assert other['identity']['tokenizer'] == meta['identity']['tokenizer']
    assert read_split(folder, other, 'val') == direct
    assert not read_split(folder, other, 'train')
    assert other['unigram_entropy'] == entropy_of(direct)


def test_identity(tmp_path):
    """It says what makes the ids, not where that lies."""
    texts = make_texts(60)
    folder, meta = prepare(tmp_path, texts)
    given = f'sentencepiece:{folder}/tokenizer/sentencepiece.model'
    _, same = prepare(tmp_path, texts, name='same', tokenizer=given)
    _, other = prepare(tmp_path, texts, name='other', vocab_size=50)
    assert same['identity'] == meta['identity']
    assert not other['identity'].items() & meta['identity'].items()


def test_a_large_vocabulary(tmp_path):
    """CR LF ends a line, U+2028 does not; a byte order mark is no character; above 65,536 ids are uint32."""
    pieces = ['[PAD]', '\u2028', *VOCAB[1:5], 'red', *(f'w{i}' for i in range(66000))]
    (tmp_path / 'vocab.txt').write_bytes('\ufeff'.encode() + '\r\n'.join([*pieces, '']).encode())
    texts = ['red w65999', 'red w65999 w0']
    folder, meta = prepare(tmp_path, texts, tokenizer=f'wordpiece:{tmp_path}/vocab.txt', val_fraction=0.5)
    assert (meta['vocab_size'], meta['special']['unk'], meta['dtype']) == (66007, 2, 'uint32')
    assert [prepare_data.id_type(n).name for n in (65536, 65537)] == ['uint16', 'uint32']
    assert read_all(folder, meta) == [(6, 66006), (6, 66006, 7)]


def test_characters_by_falling_frequency():
    texts = ['好好好好好，，，，Ba b\u3000A', '人人人人é～～～Ｚ']
    # 好 5, ， and 人 4 (U+4EBA is before U+FF0C), ～ 3, a and b 2, e and ｚ 1; white space is no piece
    pieces = [*VOCAB[:5], '好', '人', '，', '～', '##～', 'a', '##a', 'b', '##b', 'e', '##e', 'ｚ', '##ｚ']
    for size, n in ((60, 18), (17, 16)):                        # of the 17 'ｚ' would need two
        config = {'vocab_size': size, 'lower_case': True}
        tokenizer = open_tokenizer(*TOKENIZER['character'].make('', config, lambda: texts))
        assert tokenizer.pieces == pieces[:n]
    assert [tokenizer.pieces[i] for i in tokenizer.encode(['Bé好baz'])[0]] == ['b', '##e', '好', '[UNK]']
    # half of the pieces of a trained WordPiece are characters, and more only if it has few words to learn
    trained = prepare_data.train_wordpiece
    vocabularies = (trained([*texts, *more], {'vocab_size': 24, 'lower_case': True}).get_vocab()
                    for more in ([], 9 * ['baba abab']))
    few, usual = (sorted(vocabulary, key=vocabulary.get) for vocabulary in vocabularies)
    assert {*pieces} <= {*few}
    assert all(len(piece.removeprefix('##')) > 1 for piece in usual[12:18])


def test_training_reads_long_lines_but_no_long_words():
    """A line of 6,000 bytes, as web pages have them, is not lost to the vocabulary."""
    config = {'vocab_size': 60, 'lower_case': True}
    texts = [' '.join(WORDS[:-1] * 70), '宝' * 1000 + '玉' * 1000, *map(str, range(60)), 4200 * 'j' + 'ж',
             'щ']
    model = prepare_data.train_sentencepiece(texts, config, {'hard_vocab_limit': False})
    tokenizer = open_tokenizer(model, {'kind': 'sentencepiece'})
    unknown = [tokenizer.special_ids['unk'] in ids for ids in tokenizer.encode(['walks 宝玉', 'ж', 'щ'])]
    assert unknown == [False, True, True]               # the last is too rare


@pytest.mark.parametrize('kind, lower_case', [
    ('sentencepiece', True),
    ('sentencepiece', False),
    ('wordpiece', True),
    ('wordpiece:train', False)])
def test_exported_copy_gives_our_ids(tmp_path, specs, kind, lower_case):
    texts = [*make_texts(100, 3, CHINESE[:-1], ''), *make_texts(60, pieces=WORDS[:-1]),
             *30 * ['The Red'], ' Straße ﬁne ＦＵＬＬ\u3000width ½ É \x85']
    folder, _ = prepare(tmp_path, texts, tokenizer=specs.get(kind, kind), lower_case=lower_case,
                        vocab_size=250, val_fraction=0.01)
    ours = load_tokenizer(folder)
    theirs = fast_tokenizer(ours, 64)
    their_ids = theirs(texts, add_special_tokens=False)['input_ids']
    assert [*map(tuple, their_ids)] == encoded(folder, texts)
    ids, = encoded(folder, ['The Red'])
    assert ours.decode(ids) == ('the red' if lower_case else 'The Red')
    assert (theirs.model_max_length, theirs.pad_token_id) == (64, ours.special_ids['pad'])
    theirs.save_pretrained(tmp_path / 'bert')
    (tmp_path / 'bert' / ours.file_name).write_bytes(ours.data)                 # as train.py does
    assert encoding_digest(bert_tokenizer(tmp_path / 'bert')) == encoding_digest(ours)


@pytest.mark.parametrize('options, fits', [
    ({'normalization_rule_name': 'identity'}, True),
    ({'model_type': 'bpe'}, False),
    ({'byte_fallback': True}, False)])
def test_a_model_that_is_exported_gives_its_ids_or_is_refused(options, fits):
    texts = make_texts(200, pieces=WORDS[:-1])
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=330, hard_vocab_limit=False,
        minloglevel=2, **options)
    tokenizer = open_tokenizer(model.getvalue(), {'kind': 'sentencepiece'})
    with contextlib.nullcontext() if fits else refuses(match='only a .model of unigrams'):
        theirs = fast_tokenizer(tokenizer, 64)(texts, add_special_tokens=False)
        assert theirs['input_ids'] == [ids.tolist() for ids in tokenizer.encode(texts)]


@pytest.mark.parametrize('kind', [kind for kind in TOKENIZER if kind != 'tiktoken'])
def test_masked_text_has_the_ids_of_training_but_for_the_masks(tmp_path, kind, specs):
    """Before punctuation, inside a word's pieces, in a row, at both ends; with the exported tokenizer too."""
    texts = ['The river (of red).', 'the, the "of"', 'walks  riverriver 2of', 'red', '我们 来到，北京']
    (tmp_path / 'vocab.txt').write_text('\n'.join([*VOCAB, *'().,"', '']))
    folder, _ = prepare(tmp_path, [f'{text} {i}' for i, text in enumerate(texts * 30)], tokenizer=specs[kind])
    tokenizer = load_tokenizer(folder)
    exported = fast_tokenizer(tokenizer, 512)
    mask = tokenizer.special_ids['mask']
    for text, (ids, offsets) in zip(texts, tokenizer.encode_offsets(texts), strict=True):
        pieces = [tokenizer.pieces[i] for i in ids]
        # One [MASK] stands for all tokens of a word or a character, and for the space before it.
        starts = [i for i, piece in enumerate(pieces) if not piece.startswith(('##', '\ufffd'))
                  and pieces[i - 1:i] not in (['\u2581'], [' '])]
        words = list(itertools.pairwise([*starts, len(ids)]))
        for masked in [*([word] for word in words), words]:     # each alone, and all
            filled = text
            expected = ids.tolist()
            for begin, end in masked[::-1]:
                first, last = offsets[begin, 0], offsets[end - 1, 1]
                space = ' ' if text[first] == ' ' else ''
                filled = f'{filled[:first]}{space}[MASK]{filled[last:]}'
                expected[begin:end] = [mask]
            parts = tokenizer.encode_between_masks(filled.split('[MASK]'))
            assert sum(([*part, mask] for part in parts), [])[:-1] == expected
            assert exported(filled, add_special_tokens=False)['input_ids'] == expected, filled


@pytest.mark.parametrize('flags, pieces', [
    ({}, 'tur 北 京'),
    ({'strip_accents': False}, 'tür 北 京'),
    ({'do_lower_case': False}, 'Tür 北 京'),
    ({'tokenize_chinese_chars': False}, 'tur 北京')])
def test_a_bert_is_its_whole_tokenizer(tmp_path, flags, pieces):
    """vocab.txt with the flags of tokenizer_config.json, a tokenizer.json, or an earlier version's corpus."""
    flags = {'do_lower_case': True, **flags}
    (tmp_path / 'vocab.txt').write_text('\n'.join([*VOCAB, 'tur', 'tür', 'Tür', '北', '京', '北京']))
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps(flags))
    with refuses(match=f"so lower_case must be {flags['do_lower_case']}"):
        bert_tokenizer(tmp_path, not flags['do_lower_case'])
    bert = bert_tokenizer(tmp_path)
    folder = tmp_path / 'tokenizer'
    folder.mkdir()
    fast_tokenizer(bert, 64).backend_tokenizer.save(f'{folder}/tokenizer.json')
    alone = bert_tokenizer(folder)
    vocabulary = shutil.copy(tmp_path / 'vocab.txt', folder)
    names = {'do_lower_case': 'lower_case', 'tokenize_chinese_chars': 'handle_chinese_chars'}
    settings = {'kind': 'character', 'sha256': prepare_data.file_sum(vocabulary),
                **{names.get(flag, flag): value for flag, value in flags.items()}}
    prepare_data.write_json(folder / 'settings.json', {'tokenizer': settings})
    for tokenizer in (bert, alone, load_tokenizer(tmp_path)):
        assert encoding_digest(tokenizer) == encoding_digest(bert)
        assert [tokenizer.pieces[i] for i in tokenizer.encode(['Tür 北京'])[0]] == pieces.split()


@pytest.mark.parametrize('name, content, said', [
    ('tokenizer_config.json', '{"tokenizer_class": "BertJapaneseTokenizer"}', 'is of BertJapaneseTokenizer'),
    ('added_tokens.json', '{"E1": 15}', r"the words \['E1'\] added"),
    ('vocab.txt', '[PAD]\n[CLS]', r'Missing \[UNK\]')])
def test_a_vocabulary_of_another_class_is_refused(tmp_path, name, content, said):
    (tmp_path / 'vocab.txt').write_text('\n'.join(VOCAB))
    (tmp_path / name).write_text(content)
    with refuses(match=said):
        bert_tokenizer(tmp_path)


def make_library(kind, texts, special):
    """A small tokenizers.Tokenizer: 'bytes', as RoBERTa and ModernBERT, or 'unigram', as DeBERTa."""
    special_tokens = [AddedToken(piece, lstrip='mask' in piece.lower()) for piece in special]
    usual = {'show_progress': False, 'special_tokens': special_tokens}
    if kind == 'bytes':
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = decoders.ByteLevel()
        bytes_of_text = model.pre_tokenizer.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=bytes_of_text, **usual)
    else:
        model = Tokenizer(models.Unigram())
        model.pre_tokenizer = pre_tokenizers.Metaspace()
        model.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=100, unk_token=special[1], **usual)
    model.train_from_iterator(texts, trainer)
    return model


@pytest.mark.parametrize('kind, special, words', [
    ('bytes', '<pad> <unk> <s> </s> <mask>', 'The|\xa0river|,|\xa0red|\xa0我们'),
    ('bytes', '<|padding|> [UNK] [CLS] [SEP] [MASK]', 'The|\xa0river|,|\xa0red|\xa0我们'),
    ('bytes', '', 'The|\xa0river|,|\xa0red|\xa0我们'),
    ('unigram', '[PAD] [UNK] [CLS] [SEP] [MASK]', '|▁The|▁river,|▁red|▁|我们')])
def test_any_tokenizer_of_the_hub(tmp_path, kind, special, words):
    """It gives the ids of transformers, also exported; a special token in a text is text."""
    texts = [*make_texts(60, 3, CHINESE[:-1], ''), *make_texts(60, pieces=WORDS[:-1]), 'a 🎉 riverbed',
             'The river, red 我们']
    special = special.split()
    model = make_library(kind, 9 * texts, special)
    model.add_tokens(['riverbed'])
    keys = [f'{key}_token' for key in ('pad', 'unk', 'cls', 'sep', 'mask')]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **dict(zip(keys, special)))  # noqa: B905
    theirs.save_pretrained(tmp_path / 'theirs')
    folder, _ = prepare(tmp_path, texts, tokenizer=f'library:{tmp_path}/theirs')
    ours = load_tokenizer(folder)
    assert ours.vocab_size == len(theirs) + (0 if special else 4)       # what is missing comes after its own
    fast_tokenizer(ours, 64).save_pretrained(tmp_path / 'exported')
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / 'exported')
    for text, ids, (_, offsets) in zip(texts, ours.encode(texts), ours.encode_offsets(texts), strict=True):
        row = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        assert row['input_ids'] == ids.tolist() == exported(text, add_special_tokens=False)['input_ids']
        assert row['offset_mapping'] == [*map(tuple, offsets.tolist())]
    assert encoding_digest(bert_tokenizer(tmp_path / 'exported')) == encoding_digest(ours)

    starts = ours.word_starts()
    marked = ''.join('|' * starts[i] + ours.pieces[i].replace(' ', '\xa0') for i in ids)
    assert marked == words
    for piece in (*special, *(ours.pieces[i] for i in ours.special_ids.values())):
        ids, = ours.encode([f'a{piece} {piece}'])
        assert {*ids} & {*ours.special_ids.values()} <= {ours.special_ids.get('unk')}


# ---- Chinese words ----

def test_pieces_of_scripts_without_spaces():
    for piece in ('宝玉', 'は', 'ไทย', '𠮷'):
        assert prepare_data.is_unspaced(piece)
    for piece in ('', 'er', 'é', 'й', '가', '。', '・'):
        assert not prepare_data.is_unspaced(piece)


@pytest.mark.parametrize('text, cut, tokens', [
    ('我们用BERT模型。', '我们 用 BERT 模型 。', '|我 们 |用 |b ##e ##r ##t |模 型 |。'),
    ('买恤T', '买 恤T', '|买 |恤 |t'),
    ('买T恤,好模型', '买 T恤 , 好 模型', '|买 |t 恤 |, |好 |模 型'),
    ('b我龘', 'b我龘', '|b 我 [UNK]'),
    ('我𠮷b䷀', '我 𠮷 b䷀', '|我 |𠮷 |b ##䷀')])
def test_words_of_mixed_text(monkeypatch, text, cut, tokens):
    """jieba decides where a Chinese word starts, the pieces decide for all other text."""
    monkeypatch.setattr(prepare_data, 'load_jieba', lambda: types.SimpleNamespace(cut=lambda _: cut.split()))
    pieces = prepare_data.character_pieces(['我们用模型买恤好𠮷bert，。,䷀'], 60, True)
    tokenizer = open_tokenizer(*prepare_data.library_file(prepare_data.make_wordpiece(pieces, True)))
    (ids, marks), = prepare_data.encode_with_words(tokenizer, [text])
    marked = [f'|{tokenizer.pieces[i]}' if mark else tokenizer.pieces[i]
              for i, mark in zip(ids, marks, strict=True)]
    assert ' '.join(marked) == tokens


def test_words_stay_with_their_tokens(tmp_path):
    texts = make_texts(60, 0, CHINESE, '') + ['我来到北京清华大学']        # from jieba's README
    folder, _ = prepare(tmp_path, texts, tokenizer='character', vocab_size=100)
    folder, meta = prepare(tmp_path, texts, tokenizer=folder, segmenter='jieba', val_fraction=1.0,
                           unit_bytes=5000, name='y')
    marks = []
    for _, more in prepare_data.encode_with_words(load_tokenizer(folder), texts):
        marks += [*more, True]                                  # of [SEP]
    assert marks[-10:] == [1, 1, 0, 1, 0, 1, 0, 0, 0, 1]
    files = contents(folder)
    assert list(b''.join(files[shard['stem'] + '.words'] for shard in meta['splits']['val'])) == marks


# ---- readers ----

def test_rows_without_text_are_counted_by_reason(tmp_path):
    """The file begins with a byte order mark; a blank line is no row."""
    good = [json.dumps({'text': text}).encode() for text in make_texts(100)]
    bad = [b'{"text": null, "x": "b"}', b'{"text": 3}', b'{"text": "\xff"}', b'{"text": "cut', b'[1, 2]',
           b'null', b'{"title": "x"}', b'{"text": "\\u200b"}', b'', b'{"text": " \\n"}']
    rows = [*good[:50], *bad, b'{"text": "a\\ud800b"}', *good[50:]]           # half of a surrogate pair
    (tmp_path / 'a.jsonl').write_bytes(b'\xef\xbb\xbf' + b'\n'.join(rows))
    folder, meta = prepare(tmp_path, corpus=str(tmp_path / 'a.jsonl'), unit_bytes=9000)
    assert read_all(folder, meta) == sorted(encoded(folder, [*make_texts(100), 'a?b']))
    assert meta['dropped'] == {"rows without text in 'text'": 5, 'rows that are not JSON or not UTF-8': 2,
                               'texts without a token': 1, 'blank rows': 1}


def test_ranges_of_a_file_have_each_line_once(tmp_path):
    """Edges within lines, between them, within a long one; ranges without the beginning of a line."""
    texts = [7 * i % 40 * 'é' + str(i) for i in range(60)] + ['x' * 300, 'last']
    file = write_jsonl(tmp_path / 'a.jsonl', texts)
    for unit_bytes in range(60, 2000, 31):
        found, _ = unit_texts(file, unit_bytes=unit_bytes)
        assert sum(found, []) == texts, unit_bytes


def test_readers_agree(tmp_path, capfd, monkeypatch):
    """The case of a suffix does not matter; files of other kinds are counted; a .json may be one value.

    Whatever links lead to a file, it is read once; hidden ones never.
    """
    monkeypatch.setattr(prepare_data, 'FEW_TEXTS', 40)          # so the 40 text files below are not few
    bom = '\ufeff'.encode()
    texts = make_texts(40, between='\n\n')
    rows = [{'text': text} for text in texts]
    data = Path(write_jsonl(tmp_path / 'a.jsonl', texts)).read_bytes()
    files = {
        'lines/c4-train.00000-of-01024.json': data,
        'lines/b.csv': b'',
        'gz/deep/a.JSONL.GZ': gzip.compress(data),
        'zst/a.ndjson.zst': zstandard.compress(data[:999]) + zstandard.compress(data[999:]),
        'list/a.json': bom + b' ' + json.dumps(rows, indent=1).encode(),
        'txt/[deep]/.hidden.txt': b'hidden',
    }
    for i, row in enumerate(rows):
        files[f'txt/[deep]/{i}' + ('.txt', '', '.TXT', '.md')[i % 4]] = bom + row['text'].encode()
        files[f'one/{i}.json'] = json.dumps(row, indent=2).encode()
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for place in ('again', '[deep]/up', '[deep]/top'):          # two that lead up are a maze
        (tmp_path / 'txt' / place).symlink_to(tmp_path / 'txt')
    pyarrow.parquet.write_table(pyarrow.table({'n': range(40), 'text': texts}), tmp_path / 'a.parquet')
    for source in ('lines', 'gz/*/*.GZ', 'zst', 'list', 'one', 'a.parquet', 'txt', 'txt/[deep]', 'txt/*/*',
                   'txt/[[]deep]', 't?t'):
        found, _ = unit_texts(tmp_path / source, unit_bytes=2000)
        assert sorted(sum(found, [])) == sorted(texts), source
    assert re.findall('not read.*', capfd.readouterr().err) == ['not read: 1 .csv']


def test_documents_between_blank_lines(tmp_path):
    """As CLUECorpusSmall, or in few text files: each once, in order; one that is not UTF-8 is left out."""
    texts = [text.replace(' ', '\n') for text in make_texts(60)]
    for k in range(3):
        (tmp_path / f'{k}.txt').write_bytes(
            b'\n' * k + '\n \n\n'.join(texts[20 * k:20 * k + 20]).encode() + b'\n\n\xff\n')
    found, dropped = unit_texts('cluecorpussmall', path=str(tmp_path))
    assert [text.strip() for text in sum(found, [])] == texts
    assert dropped == {'rows that are not JSON or not UTF-8': 3}
    assert unit_texts(tmp_path)[0] == found
    (tmp_path / '0.txt').write_text('\none\ntwo \u2028 too\n')      # no blank line between texts: its lines
    assert unit_texts(tmp_path / '0.txt')[0] == [['one', 'two \u2028 too']]


@pytest.mark.parametrize('joined, documents', [
    ('^ = [^=]', [' = A = \none\n = = s = = ', ' = B = \ntwo']),
    (2, [' = A = \none', ' = = s = = \n = B = ', 'two']),
    (9, [' = A = \none\n = = s = = \n = B = \ntwo'])])
def test_rows_are_joined(joined, documents):
    rows = ' = A = \n', 'one\n', ' = = s = = \n', ' = B = \n', 'two'
    assert list(prepare_data.join_rows(rows, joined)) == documents


def test_oscar_filter_on_both_schemas(tmp_path):
    passes = [
        '{}',
        '{"annotation": null}',
        '{"identification": {"label": "EN"}}',
        '{"harmful_pp": 5.0, "categories": ["blog"]}',
        '{"harmful_pp": null, "quality_warnings": null, "categories": null}']
    fails = [
        '{"annotation": ["tiny"]}',
        '{"quality_warnings": ["header"]}',
        '{"harmful_pp": 4.9}',
        '{"harmful_pp": 100001.0}',
        '{"identification": {"label": "fr"}}']
    blocked = ('agressif adult cryptojacking dangerous_material phishing warez ddos hacking malware '
               'mixed_adult sect')
    fails += [f'{{"categories": ["blog", "{category}"]}}' for category in blocked.split()]
    english = {'identification': {'label': 'en', 'prob': 0.9}}
    rows = [{'content': more, 'metadata': english | json.loads(more)} for more in passes + fails]
    rows.append({'content': 'x', 'metadata': 'none'})
    (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    found, dropped = unit_texts('oscar', path=str(tmp_path))
    assert (found, dropped.total()) == ([passes], len(fails) + 1)


def test_docstrings_of_a_package(tmp_path, monkeypatch):
    """In the order of the files, of the statements by depth; each once; the package is not imported."""
    text = 'A sentence that is long enough to be kept, number {}.'.format
    files = {'__init__.py': f'"""{text(1)}"""\nclass A:\n    """{text(2)}\n\n    more\n    """\n'
                            f'    async def f(self):\n        """{text(1)}"""\n        """{text(9)}"""\n',
             'b.py': f'raise OSError\nif x:\n    def f():\n        "{text(3)}"\n'
                     f'add_newdoc("a", "b", """{text(4)}{text(5)}""")\nf = lambda: 1\ndef g():\n    "short"',
             'c.py': 'def broken(:\n',
             'deep/a.py': f'"""{text(6)}"""'}
    package = tmp_path / 'tinypackage'
    (package / 'deep').mkdir(parents=True)
    for name, content in files.items():
        (package / name).write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    usual = {'path': 'tinypackage', 'text_field': 'body', 'tokenizer': 'wordpiece:train'}
    folder, meta = prepare(tmp_path, **usual)
    lines = [json.loads(line) for line in contents(folder)['docstrings.jsonl'].splitlines()]
    assert 'tinypackage' not in sys.modules
    assert [(line['where'], line['text']) for line in lines] == [
        ('tinypackage/__init__.py:1', text(1)),
        ('tinypackage/__init__.py:3', text(2) + '\n\nmore'),
        ('tinypackage/b.py:5', text(4) + text(5)),
        ('tinypackage/b.py:4', text(3)),
        ('tinypackage/deep/a.py:1', text(6))]
    assert len(read_all(folder, meta)) == 5


# ---- units, parts and plans ----

def test_files_are_joined_and_cut_to_units(tmp_path):
    for name, size in (('a.jsonl', 10), ('b.jsonl', 100), ('c.txt', 100), ('d.jsonl.gz', 100)):
        (tmp_path / name).write_bytes(b'\n' * size)
    a, b, c, d = sorted(map(str, tmp_path.iterdir()))
    assert [unit['ranges'] for unit in units_of(tmp_path, unit_bytes=70)] == [
        [[a, 0, None], [b, 0, 50]],
        [[b, 50, None]],
        [[c, 0, None]],
        [[d, 0, None]]]


def test_a_plan_is_kept_or_begun_again(tmp_path, specs):
    """Other knobs or inputs are refused; without units.json all is made anew, whatever lies there."""
    (tmp_path / 'files').mkdir()
    for k in range(3):
        write_jsonl(tmp_path / 'files' / f'{k}.jsonl', make_texts(70, seed=k))
    usual = {'corpus': f'{tmp_path}/files', 'unit_bytes': 4000, 'tokenizer': specs['wordpiece']}
    folder, _ = prepare(tmp_path, **usual)
    before = contents(folder)
    for name in ('unit_00000', 'unit_00001', 'meta'):           # as if it was killed
        os.remove(f'{folder}/{name}.json')
    for part, num_proc in (('1/2', 2), ('0/2', 1)):
        prepare_data.prepare(knobs(tmp_path, **usual, part=part, num_proc=num_proc))
    assert contents(folder) == before
    with refuses(match='has vocab_size=60, this run has vocab_size=50'):
        prepare(tmp_path, **usual, vocab_size=50)
    write_jsonl(tmp_path / 'files' / '9.jsonl', make_texts(10))
    (tmp_path / 'vocab.txt').write_text('\n'.join([*VOCAB, 'blue']))
    os.utime(tmp_path / 'files' / '1.jsonl', (1, 1))            # other texts of the same size
    with refuses(match=r'this run has .*/1.jsonl=\[.*/9.jsonl=\[.*/vocab.txt=\['):
        prepare(tmp_path, **usual)
    os.remove(f'{folder}/units.json')
    again, _ = prepare(tmp_path, **usual, vocab_size=50)
    other, _ = prepare(tmp_path / 'other', **usual, vocab_size=50)
    assert contents(again) == contents(other)


@pytest.mark.parametrize('val_fraction, small', [(1e-9, 'val'), (1 - 1e-9, 'train')])
def test_no_split_is_empty(tmp_path, val_fraction, small):
    """The document whose hash is nearest moves there. Of one text nothing can."""
    texts = sorted(make_texts(12), key=text_hash)
    nearest = texts[0] if small == 'val' else texts[-1]
    usual = {'val_fraction': val_fraction, 'tokenizer': 'wordpiece:train', 'unit_bytes': 500}
    folder, meta = prepare(tmp_path, texts, **usual)
    assert read_split(folder, meta, small) == encoded(folder, [nearest])
    assert len(read_all(folder, meta)) == 12
    with refuses(match='two documents that differ$'):
        prepare(tmp_path, ['red'] * 3, **usual, name='y')
    long = min((f'{i} ' + 999 * 'red ' for i in range(999)), key=text_hash)
    with contextlib.nullcontext() if small == 'train' else refuses(match='tokens are left for training'):
        prepare(tmp_path, [*texts, long], **usual, name='z')


def test_max_documents_are_the_first_of_each_unit(tmp_path):
    file = write_jsonl(tmp_path / 'a.jsonl', [None, *make_texts(300)])
    units, _ = unit_texts(file, unit_bytes=10_000)
    found, dropped = unit_texts(file, unit_bytes=10_000, max_documents=50)
    assert found == [texts[:math.ceil(50 / len(units))] for texts in units]
    assert dropped.total() == 1


def test_a_sample_is_of_the_whole_corpus_but_for_what_is_held_out(tmp_path):
    """Texts of smallest hash, of another seed, of the first of each unit, by its bytes; of up to 16 units."""
    limit = 2**63                                               # half of the texts
    texts = [[f'{k} {i:098}' for i in range(n)] for k, n in enumerate((100, 300))]
    files = [write_jsonl(tmp_path / f'{k}.jsonl', texts[k]) for k in range(2)]
    known = [[text for text in part if text_hash(text) >= limit] for part in texts]
    by_hash = [sorted(part, key=partial(text_hash, seed=2)) for part in (known[0][:30], known[1][:90])]
    units = units_of(tmp_path, unit_bytes=os.path.getsize(files[1]))
    assert prepare_data.take_sample(units, limit, 1200) == by_hash[0][:3] + by_hash[1][:9]
    units = units_of(tmp_path, unit_bytes=1000)
    sample = prepare_data.take_sample(units, 0, 1300)
    assert len(units) > len(sample) == 16
    assert int(sample[-1][2:]) > 200


def test_the_tokenizer_does_not_depend_on_what_is_held_out(tmp_path):
    """Other texts are held out: the tokenizer is the same to the byte. Without others none is trained."""
    texts = make_texts(300)
    held_out = [text for text in texts if text_hash(text) < 0.1 * 2**64]
    others = [text for text in make_texts(900, 1, CHINESE) if text_hash(text) < 0.1 * 2**64]
    changed = {**{text: text for text in texts}, **dict(zip(held_out, others, strict=False))}
    assert len(others) > len(held_out) > 20
    one, other = (load_tokenizer(prepare(tmp_path, part, name=name)[0]).data
                  for name, part in (('a', texts), ('b', changed.values())))
    assert one == other
    with refuses(match='no text that is not held out'):
        prepare(tmp_path, texts, val_fraction=1.0, name='y')


# ---- mistakes and damage ----

@pytest.mark.parametrize('name, argument, said', [
    ('a.jsonl', '--val_fraction=0', 'val_fraction=0.0: must be above 0 and at most 1'),
    ('a.jsonl', '--text_field=body', "text_field='body': the fields of the first row are id, text"),
    ('a.jsonl', '--segmenter=jieba', "segmenter='jieba': must be jieba, with tokenizer=wordpiece"),
    ('a.txt', '--path=', "/a.txt': no such file, folder or glob"),
    ('chinese.jsonl', '--path=', "vocab_size=20: the texts' characters alone need "),
    ('a.jsonl', '--part=4/4', "part='4/4': must be i/n with i from 0 to n - 1, as in 0/4"),
    ('cut.jsonl.gz', '--part=0/1', 'cut.jsonl.gz: cannot be read: '),
    ('two.json', '--part=0/1', 'two.json: cannot be read: Extra data')])
def test_mistakes_are_one_line(tmp_path, stage, name, argument, said):
    """And leave no plan behind that a corrected command would go on with."""
    file = write_jsonl(tmp_path / 'a.jsonl', make_texts(30))
    (tmp_path / 'cut.jsonl.gz').write_bytes(gzip.compress(Path(file).read_bytes())[:-20])
    write_jsonl(tmp_path / 'chinese.jsonl', [chr(0x4e00 + i) for i in range(300)])
    (tmp_path / 'two.json').write_text('{\n "text": "a"\n}\n{\n "text": "b"\n}\n')
    done = stage('prepare_data', f'--corpus={tmp_path}/{name}', f'--data_dir={tmp_path}/data', '--num_proc=1',
                 '--vocab_size=20', argument)
    assert done.code == 2
    assert said in done.err.splitlines()[-1]
    assert not glob.glob(f'{tmp_path}/data/*/*.json')


def test_a_run_checks_the_sizes_of_shards(tmp_path, monkeypatch):
    """Of a large corpus only these; test_train.py has the checksums of a small one. And its tokenizer."""
    monkeypatch.setattr(prepare_data, 'SUMS_BELOW', 0)
    folder, meta = prepare(tmp_path, make_texts(60, 0, CHINESE, ''), tokenizer='wordpiece:train',
                           segmenter='jieba', unit_bytes=3000, val_fraction=0.3)
    prepare_data.check_corpus(folder, meta)
    for name, size in (('val_00001.idx', 1), ('train_00002.words', 0), ('train_00000.bin', 1)):
        os.truncate(f'{folder}/{name}', size)
        with refuses(match=f'{name}: missing, damaged'):
            prepare_data.check_corpus(folder, meta)
    flip(f'{folder}/tokenizer/tokenizer.json')
    with refuses(match='tokenizer/tokenizer.json: missing or damaged'):
        load_tokenizer(folder)


def test_a_killed_worker_is_one_line():
    with refuses(match='killed, perhaps for want of memory: try --num_proc=1'):
        prepare_data.in_parallel(os.abort, [()], 2)


# ---- real processes ----

@pytest.mark.slow
def test_two_machines_are_killed_and_go_on(tmp_path):
    """Workers end with their command; what was done stays; the bytes are those of one process."""
    for k in range(5):
        write_jsonl(tmp_path / f'{k}.jsonl', make_texts(k and 6000, seed=k))
    usual = {'corpus': f'{tmp_path}/*.jsonl', 'tokenizer': 'wordpiece:train', 'tokenizer_sample': 100_000,
             'unit_bytes': 60_000}
    parts = [['prepare_data.py', *words(**knobs(tmp_path, **usual, num_proc=2, part=f'{i}/2'))]
             for i in range(2)]
    records = f'{tmp_path}/data/x/unit_0*.json'
    both = [launch(*part) for part in parts]
    while both[0].poll() is None and len(glob.glob(records)) < 5:
        time.sleep(0.001)
    for started, number in zip(both, (signal.SIGKILL, signal.SIGINT), strict=True):
        os.kill(started.pid, number)
        started.communicate(timeout=60)
        assert started.returncode != 0
        with pytest.raises(ProcessLookupError):                 # the workers are gone, too
            for _ in range(200):
                os.killpg(started.pid, 0)
                time.sleep(0.05)
    done = {file: os.stat(file).st_mtime_ns for file in glob.glob(records)}
    for part in parts:
        assert process(*part).code == 0
    assert done == {file: os.stat(file).st_mtime_ns for file in done}
    assert contents(f'{tmp_path}/data/x') == contents(prepare(tmp_path / 'one', **usual)[0])
