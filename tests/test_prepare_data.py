"""prepare_data.py: the same bytes from any reader, process and part; no unit lost, no text in both splits."""
import collections
import glob
import gzip
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import sys
import time
import types

import numpy as np
import pytest
from conftest import ROOT, kill, launch, process, refused, torchrun, words

import prepare_data
from configurator import UserError, configure

pytest.importorskip('sentencepiece')
DEFAULTS = configure(dict(vars(prepare_data)), [])
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
    usual = {'data_dir': str(home / 'data'), 'name': 'x', 'vocab_size': 60, 'num_proc': 1,
             'val_fraction': 0.1}
    return {**DEFAULTS, **usual, **changes}


def prepare(folder, **changes):
    """(folder, meta) of a prepared corpus."""
    made = prepare_data.prepare(knobs(folder, **changes))
    return made, prepare_data.load_meta(made)


def make_texts(count, seed=0, pieces=WORDS, between=' '):
    """Texts of 3 to 60 words, all different."""
    pick = random.Random(seed)
    return [f'{i} ' + between.join(pick.choices(pieces, k=pick.randint(3, 60))) for i in range(count)]


def write_jsonl(file, texts, field='text', opener=open):
    with opener(file, 'wb') as stream:
        for text in texts:
            stream.write(json.dumps({'id': 1, field: text}).encode() + b'\n')
    return str(file)


def read_split(folder, meta, split):
    """The documents of a split as tuples of ids without [SEP]; checks the .idx files on the way."""
    documents = []
    for shard in meta['splits'][split]:
        stem = os.path.join(folder, shard['stem'])
        ids, starts = np.fromfile(f'{stem}.bin', meta['dtype']), np.fromfile(f'{stem}.idx', '<i8')
        assert starts[0] == 0 and starts[-1] == len(ids) == shard['tokens']
        assert len(starts) - 1 == shard['documents']
        assert np.array_equal(starts[1:] - 1, np.flatnonzero(ids == meta['special']['sep']))
        documents += [tuple(ids[a:b - 1].tolist()) for a, b in itertools.pairwise(starts)]
    return documents


def read_all(folder, meta):
    return sorted(read_split(folder, meta, 'train') + read_split(folder, meta, 'val'))


def encoded(folder, texts):
    return list(map(tuple, prepare_data.load_tokenizer(folder).encode(texts)))


def contents(folder):
    """{path within a folder: bytes} of all files."""
    files = (item for item in sorted(pathlib.Path(folder).rglob('*')) if item.is_file())
    return {str(item.relative_to(folder)): item.read_bytes() for item in files}


def units_of(folder):
    return json.loads(pathlib.Path(folder, 'units.json').read_bytes())['units']


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """{kind of tokenizer: the knob}; the names of tiktoken are a small encoding without a network."""
    (tmp_path / 'vocab.txt').write_text('\n'.join(VOCAB) + '\n')
    tiktoken = pytest.importorskip('tiktoken')
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
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=specs[kind], unit_bytes=10_000)
    found, direct = prepare_data.load_tokenizer(folder), encoded(folder, texts)
    held = [prepare_data.text_hash(text, prepare_data.HASH_SEED) < 0.1 * 2**64 for text in texts]
    assert len(units_of(folder)) > 3 and any(held)
    for split, wanted in (('train', False), ('val', True)):
        assert read_split(folder, meta, split) == [
            ids for ids, val in zip(direct, held, strict=True) if val == wanted]
    specials = set(found.special.values())
    assert not set(direct[-1]) & specials and 'mask' in found.decode(direct[-1]).lower()
    assert found.pieces[found.special['mask']] == '[MASK]' and len(found.pieces) == meta['vocab_size']
    assert set(found.special) == {'pad', 'cls', 'sep', 'mask'} | ({'unk'} if kind != 'tiktoken' else set())
    if kind == 'tiktoken':
        assert found.special['pad'] == 301                      # after the ids of its own special tokens
    starts = np.fromfile(os.path.join(folder, 'tokenizer', 'word_start.bin'), bool)
    rule = {'sentencepiece': lambda piece: piece[:1] == '\u2581',
            'tiktoken': lambda piece: not piece[:1].isalnum() and piece[:1] != '\ufffd'
            }.get(kind, lambda piece: piece[:2] != '##')
    assert starts.tolist() == [i in specials or rule(piece) for i, piece in enumerate(found.pieces)]


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_a_validation_corpus_with_the_tokenizer_of_another(tmp_path, specs, kind):
    """val_fraction=1 and tokenizer=FOLDER: the ids that the other's tokenizer gives, all held out."""
    source, texts = write_jsonl(tmp_path / 'a.jsonl', make_texts(100)), make_texts(50, seed=1)
    first, meta = prepare(tmp_path, corpus=source, tokenizer=specs[kind], lower_case=False)
    folder, other = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'b.jsonl', texts), tokenizer=first,
                            val_fraction=1.0, name='ptb', unit_bytes=3000)
    assert other['identity']['tokenizer'] == meta['identity']['tokenizer']
    assert other['tokenizer'] == meta['tokenizer'] and other['special'] == meta['special']
    assert read_split(folder, other, 'val') == encoded(first, texts)
    assert not read_split(folder, other, 'train')
    share = np.unique(np.concatenate(encoded(first, texts)), return_counts=True)[1]
    share = share / share.sum()
    assert other['unigram_entropy'] == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)
    prepare_data.check_sizes(folder, other, sums=True)


def test_entropy_and_identity(tmp_path):
    """Of the training tokens without [SEP]; the identity is of what makes the ids, not of where it lies."""
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(300))
    folder, meta = prepare(tmp_path, corpus=source, unit_bytes=20_000)
    share = np.unique(np.concatenate(read_split(folder, meta, 'train')), return_counts=True)[1]
    share = share / share.sum()
    assert meta['unigram_entropy'] == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)
    assert meta['special'] == {'pad': 0, 'unk': 1, 'cls': 2, 'sep': 3, 'mask': 4}
    given = f'sentencepiece:{folder}/tokenizer/sentencepiece.model'
    usual = {'corpus': source, 'unit_bytes': 20_000}
    assert prepare(tmp_path, **usual, tokenizer=given, name='same')[1]['identity'] == meta['identity']
    others = [prepare(tmp_path, **usual, tokenizer=given, val_fraction=0.3, name='other')[1],
              prepare(tmp_path, **usual, vocab_size=50, name='fewer')[1]]
    for other, same in zip(others, ([True, False, False], [False] * 3), strict=True):
        assert [other['identity'][key] == value for key, value in meta['identity'].items()] == same


def test_case_of_a_bert_vocabulary(tmp_path):
    """lower_case=False keeps the capitals of a cased vocabulary; CR LF ends a line, U+2028 does not."""
    pieces = ['[PAD]', '\u2028', '[UNK]', '[CLS]', '[SEP]', '[MASK]', 'red', 'Red', '\x85']
    (tmp_path / 'vocab.txt').write_bytes('\r\n'.join(pieces).encode() + b'\r\n')
    source = write_jsonl(tmp_path / 'a.jsonl', [f'Red red{" red" * i}' for i in range(30)])
    usual = {'corpus': source, 'tokenizer': f'wordpiece:{tmp_path}/vocab.txt'}
    for lower_case, first in ((False, (7, 6)), (True, (6, 6))):
        folder, meta = prepare(tmp_path, **usual, lower_case=lower_case, name=str(lower_case))
        assert meta['vocab_size'] == 9 and meta['special']['unk'] == 2
        assert {ids[:2] for ids in read_all(folder, meta)} == {first}


def test_large_vocabulary_is_uint32(tmp_path):
    (tmp_path / 'vocab.txt').write_text('\n'.join(VOCAB + [f'w{i}' for i in range(66000)]))
    source = write_jsonl(tmp_path / 'a.jsonl', [f'the w{i} w{65990 + i % 10}' for i in range(50)])
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=f'wordpiece:{tmp_path}/vocab.txt')
    assert meta['dtype'] == 'uint32' and max(map(max, read_all(folder, meta))) > 65536


def test_characters_by_falling_frequency(tmp_path):
    texts = ['好好好好好，，，，Ba b\u3000A', '人人人人é～～～Ｚ']
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', texts), 'tokenizer': 'character',
             'val_fraction': 0.4}
    folder, _ = prepare(tmp_path, **usual)
    # 好 5, ， and 人 4 (U+4EBA is before U+FF0C), ～ 3, a and b 2, e and ｚ 1; white space is no piece
    pieces = [*VOCAB[:5], '好', '人', '，', '～', '##～', 'a', '##a', 'b', '##b', 'e', '##e', 'ｚ', '##ｚ']
    assert contents(folder)['tokenizer/vocab.txt'].decode().split('\n') == [*pieces, '']
    found = prepare_data.load_tokenizer(folder)
    assert [found.pieces[i] for i in found.encode(['Bé好baz'])[0]] == ['b', '##e', '好', '[UNK]']
    cut, _ = prepare(tmp_path, **usual, vocab_size=17, name='cut')              # not without its '##' piece
    assert contents(cut)['tokenizer/vocab.txt'].decode().split('\n') == [*pieces[:16], '']


@pytest.mark.parametrize('lower_case', [True, False])
def test_exported_copy_gives_our_ids(tmp_path, lower_case):
    """But for ties, which have the same score, and for decomposed capitals (A + U+0301), which it keeps."""
    pytest.importorskip('transformers')
    from pydoc_data.topics import topics
    texts = [line for topic in topics.values() for line in topic.splitlines()][:3000]
    texts += make_texts(100, 3, CHINESE[:-1], '') + ['Straße ﬁne ＦＵＬＬ\u3000width ½ É']
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    folder, _ = prepare(tmp_path, corpus=source, vocab_size=1000, lower_case=lower_case)
    ours = prepare_data.load_tokenizer(folder)
    theirs = prepare_data.fast_tokenizer(ours, 64)
    ties = 0
    assert ours.decode(ours.encode(['The Red'])[0]) == ('the red' if lower_case else 'The Red')
    for text, ids in zip(texts, ours.encode(texts), strict=True):
        other = theirs(text, add_special_tokens=False)['input_ids']
        if other != ids:
            scores = [sum(map(ours.model.get_score, one)) for one in (ids, other)]
            assert scores[0] == pytest.approx(scores[1], rel=1e-5), text
            ties += 1
    assert ties < len(texts) / 100
    cls, mask, sep = (ours.special[key] for key in ('cls', 'mask', 'sep'))
    assert theirs('a [MASK]')['input_ids'] == [cls, *ours.encode(['a'])[0], mask, sep]
    assert theirs.model_max_length == 64 and theirs.pad_token_id == ours.special['pad']


def test_exported_wordpiece_gives_our_ids(tmp_path, specs):
    pytest.importorskip('transformers')
    texts = make_texts(60, pieces=WORDS[:-1])
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    folder, _ = prepare(tmp_path, corpus=source, tokenizer=specs['wordpiece'])
    theirs = prepare_data.fast_tokenizer(prepare_data.load_tokenizer(folder), 64)
    assert list(map(tuple, theirs(texts, add_special_tokens=False)['input_ids'])) == encoded(folder, texts)
    with pytest.raises(UserError, match='only sentencepiece, wordpiece and character'):
        prepare_data.fast_tokenizer(types.SimpleNamespace(), 64)


# ---- Chinese words ----

@pytest.mark.parametrize('text, cut, tokens', [
    ('我们用BERT模型。', '我们 用 BERT 模型 。', '|我 们 |用 |b ##e ##r ##t |模 型 |。'),
    ('买恤T', '买 恤T', '|买 |恤 |t'), ('买T恤,好模型', '买 T恤 , 好 模型', '|买 |t 恤 |, |好 |模 型'),
    ('b我龘', 'b我龘', '|b 我 [UNK]'), ('我𠮷b䷀', '我 𠮷 b䷀', '|我 |𠮷 |b ##䷀')])
def test_words_of_mixed_text(tmp_path, monkeypatch, text, cut, tokens):
    """jieba decides where a Chinese word starts, the pieces decide for all other text."""
    source = write_jsonl(tmp_path / 'a.jsonl', ['我们用模型买恤好𠮷bert，。,䷀', '们'])
    folder, _ = prepare(tmp_path, corpus=source, tokenizer='character', val_fraction=1.0)
    monkeypatch.setattr(prepare_data, 'load_jieba', lambda: types.SimpleNamespace(cut=lambda _: cut.split()))
    found = prepare_data.load_tokenizer(folder)
    (ids, offsets), = found.encode_offsets([text])
    marks = prepare_data.mark_words(text, ids, offsets, np.array(found.word_starts()))
    marked = ' '.join('|' * bool(mark) + found.pieces[i] for i, mark in zip(ids, marks, strict=True))
    assert marked == tokens and ids == found.encode([text])[0]


def test_words_stay_with_their_tokens(tmp_path, monkeypatch, capfd):
    pytest.importorskip('jieba')
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path / 'temporary'))
    (tmp_path / 'temporary').mkdir()
    texts = make_texts(60, 0, CHINESE, '') + ['我来到北京清华大学']        # from jieba's README
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', texts), 'tokenizer': 'character', 'vocab_size': 100,
             'val_fraction': 0.2, 'unit_bytes': 5000}
    folder, meta = prepare(tmp_path, **usual, segmenter='jieba')
    assert not os.listdir(tmp_path / 'temporary') and 'jieba' not in capfd.readouterr().err
    found = prepare_data.load_tokenizer(folder)
    word_start = np.array(found.word_starts())
    marks = {tuple(ids): prepare_data.mark_words(text, ids, offsets, word_start).tolist()
             for text, (ids, offsets) in zip(texts, found.encode_offsets(texts), strict=True)}
    assert list(map(int, marks[encoded(folder, texts[-1:])[0]])) == [1, 1, 0, 1, 0, 1, 0, 0, 0]
    for split, shards in meta['splits'].items():
        stems = [os.path.join(folder, shard['stem']) for shard in shards]
        written = np.concatenate([np.fromfile(f'{stem}.words', np.uint8) for stem in stems]).tolist()
        assert written == [mark for ids in read_split(folder, meta, split) for mark in [*marks[ids], True]]
    plain, without = prepare(tmp_path, **usual, name='plain')
    assert contents(plain)['train_00000.bin'] == contents(folder)['train_00000.bin']
    assert 'segmenter' not in without and meta['segmenter'] == {'kind': 'jieba'}


# ---- readers ----

def test_rows_without_text_are_counted_and_the_first_is_shown(tmp_path, capfd):
    """The file begins with a byte order mark; what is shown has no control characters."""
    good = [json.dumps({'text': text}).encode() for text in make_texts(100)]
    bad = [b'{"text": null, "x": "a\\u001b[31m' + b'b' * 300 + b'"}', b'{"text": 3}', b'{"text": "\xff"}',
           b'{"text": "cut', b'[1, 2]', b'{"title": "x"}', b'{"text": "\\u200b"}']     # the last has no token
    more = [b'', b'{"text": " \\n"}', b'{"text": "a\\ud800b"}']               # a lone surrogate is a '?'
    (tmp_path / 'a.jsonl').write_bytes(b'\xef\xbb\xbf' + b'\n'.join([*good[:50], *bad, *more, *good[50:]]))
    folder, meta = prepare(tmp_path, corpus=str(tmp_path / 'a.jsonl'))
    assert read_all(folder, meta) == sorted(encoded(folder, [*make_texts(100), 'a?b']))
    assert meta['left_out'][0] == len(bad) + 1                  # a blank text counts, a blank line does not
    line, = (line for line in capfd.readouterr().err.splitlines() if 'left out' in line)
    assert f'{len(bad) + 1} rows left out' in line and "a.jsonl: {'text': None" in line
    assert line.isprintable() and len(line) < 400


@pytest.mark.parametrize('unit_bytes', [40, 300, 7000])
def test_ranges_of_a_file_have_each_line_once(tmp_path, unit_bytes):
    """Edges within lines, between them, within a long one, and more ranges than lines."""
    lines = [json.dumps('é' * (7 * i % 40) + str(i), ensure_ascii=False) for i in range(60)]
    lines += [json.dumps('x' * 3000), '"last"']
    (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
    config = knobs(tmp_path, folder='f', unit_bytes=unit_bytes)
    units = prepare_data.local_units(str(tmp_path / 'a.jsonl'), config)
    found = [row for unit in units for _, row in prepare_data.read_rows(unit, 'f')]
    assert found == list(map(json.loads, lines)) and len(units) == {40: 140, 300: 19, 7000: 1}[unit_bytes]
    size = os.path.getsize(tmp_path / 'a.jsonl')
    for edge in range(0, size, 7):                              # also at the first byte of a line
        found = [row for ends in ((0, edge), (edge, size)) if ends[0] < ends[1] or edge == 0
                 for row in prepare_data.read_jsonl(str(tmp_path / 'a.jsonl'), *ends, None)]
        assert found == list(map(json.loads, lines)), edge


def test_readers_agree(tmp_path):
    zstandard, arrow = pytest.importorskip('zstandard'), pytest.importorskip('pyarrow')
    parquet, texts = pytest.importorskip('pyarrow.parquet'), make_texts(40)
    for name in ('jsonl', 'gz/deep', 'txt/deep', 'json', 'zst', 'parquet'):
        (tmp_path / name).mkdir(parents=True)
    data = pathlib.Path(write_jsonl(tmp_path / 'jsonl' / 'a.jsonl', texts)).read_bytes()
    half = data.index(b'\n', len(data) // 2) + 1
    frames = [zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])]
    (tmp_path / 'zst' / 'a.jsonl.zst').write_bytes(b''.join(frames))
    write_jsonl(tmp_path / 'json' / 'c4-train.00000-of-01024.json', texts)
    (tmp_path / 'json' / 'notes.md').write_text('of no use')
    write_jsonl(tmp_path / 'gz' / 'deep' / 'a.jsonl.gz', texts, opener=gzip.open)
    parquet.write_table(arrow.table({'n': range(20), 'text': texts[:20]}), tmp_path / 'parquet' / 'a.parquet')
    parquet.write_table(arrow.table({'n': range(20), 'text': texts[20:]}), tmp_path / 'parquet' / 'b.parquet')
    for i, text in enumerate(texts):
        (tmp_path / 'txt' / 'deep' / f'{i}{".txt" if i % 2 else ""}').write_text(text)
    sources = {'plain': 'jsonl/a.jsonl', 'gz': 'gz', 'txt': 'txt', 'glob': '*sonl/*.jsonl', 'json': 'json',
               'deep': 'gz/**/*.gz', 'zst': 'zst', 'parquet': 'parquet'}
    made = {name: prepare(tmp_path, corpus=str(tmp_path / source), name=name, unit_bytes=2000)
            for name, source in sources.items()}
    for name, (folder, meta) in made.items():
        assert read_all(folder, meta) == sorted(encoded(folder, texts)), name
    assert len(units_of(made['parquet'][0])) == 2 and len(units_of(made['txt'][0])) > 2


def test_documents_between_blank_lines(tmp_path):
    """As CLUECorpusSmall: each document once and in order; one that is not UTF-8 is left out."""
    texts = [text.replace(' ', '\n') for text in make_texts(60)]
    for k in range(3):
        (tmp_path / f'{k}.txt').write_bytes(
            b'\n' * k + '\n \n\n'.join(texts[20 * k:20 * k + 20]).encode() + b'\n\n\xff\n')
    folder, meta = prepare(tmp_path, corpus='cluecorpussmall', path=str(tmp_path), tokenizer='character')
    assert read_all(folder, meta) == sorted(encoded(folder, texts)) and meta['left_out'][0] == 3


def unit_of(tmp_path, rows, **changes):
    """A unit of records in a .jsonl file."""
    (tmp_path / 'rows.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return {'hub': None, 'pieces': [[str(tmp_path / 'rows.jsonl'), 0, None]], 'joined': None, 'corpus': '',
            'field': 'text', 'documents': 0, **changes}


@pytest.mark.parametrize('joined, documents', [
    ('^ = [^=]', [' = A = \none\n = = s = = ', ' = B = \ntwo']),
    (2, [' = A = \none', ' = = s = = \n = B = ', 'two']), (9, [' = A = \none\n = = s = = \n = B = \ntwo'])])
def test_rows_are_joined(tmp_path, joined, documents):
    rows = [{'text': text} for text in (' = A = \n', '', 'one\n', ' = = s = = \n', ' = B = \n', None, 'two')]
    left_out = [0, '']
    unit = unit_of(tmp_path, rows, joined=joined)
    assert list(prepare_data.read_unit(unit, knobs(tmp_path, folder=''), left_out)) == documents
    assert left_out[0] == 1


ENGLISH = {'identification': {'label': 'en', 'prob': 0.9}}


@pytest.mark.parametrize('metadata, passes', [
    (ENGLISH, True), (dict(ENGLISH, annotation=None), True), (dict(ENGLISH, annotation=['tiny']), False),
    (dict(ENGLISH, quality_warnings=['header']), False), (dict(ENGLISH, harmful_pp=4.9), False),
    (dict(ENGLISH, harmful_pp=100_001.0), False), (dict(ENGLISH, harmful_pp=5.0, categories=['blog']), True),
    (dict(ENGLISH, harmful_pp=None, quality_warnings=None, categories=None), True),
    (dict(ENGLISH, categories=['blog', 'sect']), False), ({'identification': {'label': 'fr'}}, False),
    (None, False)])
def test_oscar_filter_on_both_schemas(tmp_path, metadata, passes):
    unit = unit_of(tmp_path, [{'content': 'text', 'metadata': metadata}], corpus='oscar', field='content')
    left_out = [0, '']
    found = list(prepare_data.read_unit(unit, knobs(tmp_path, folder=''), left_out))
    assert found == ['text'] * passes and left_out[0] == (not passes)


def test_docstrings_of_a_package(tmp_path, monkeypatch):
    """In the order of the files, of the statements by depth; each once; the package is not imported."""
    text = 'A sentence that is long enough to be kept, number {}.'
    package = tmp_path / 'tinypackage'
    (package / 'deep').mkdir(parents=True)
    (package / '__init__.py').write_text(
        f'"""{text.format(1)}"""\nclass A:\n    """{text.format(2)}\n\n    more\n    """\n'
        f'    async def f(self):\n        """{text.format(1)}"""\n        """{text.format(9)}"""\n')
    (package / 'b.py').write_text(
        f'raise OSError\nif x:\n    def f():\n        "{text.format(3)}"\n'
        f'add_newdoc("a", "b", """{text.format(4)}{text.format(5)}""")\n'
        f'f = lambda: 1\ndef g():\n    "short"\n')
    (package / 'deep' / 'a.py').write_text(f'"""{text.format(6)}"""')
    (package / 'c.py').write_text('def broken(:\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    folder, meta = prepare(tmp_path, path='tinypackage', val_fraction=0.7, text_field='body',
                           tokenizer='character')
    lines = [json.loads(line) for line in contents(folder)['docstrings.jsonl'].splitlines()]
    assert [(line['package'], line['where'], line['text']) for line in lines] == [
        ('tinypackage', 'tinypackage/__init__.py:1', text.format(1)),
        ('tinypackage', 'tinypackage/__init__.py:3', text.format(2) + '\n\nmore'),
        ('tinypackage', 'tinypackage/b.py:5', text.format(4) + text.format(5)),
        ('tinypackage', 'tinypackage/b.py:4', text.format(3)),
        ('tinypackage', 'tinypackage/deep/a.py:1', text.format(6))]
    assert len(read_all(folder, meta)) == 5 and 'tinypackage' not in sys.modules


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose datasets are local files, three of them; `asked` has what was asked of it."""
    datasets, library = pytest.importorskip('datasets'), pytest.importorskip('huggingface_hub')
    sources = [write_jsonl(tmp_path / f'{k}.jsonl', [*make_texts(30, k), None, ' = A = ']) for k in range(3)]
    local, found = datasets.load_dataset, types.SimpleNamespace(asked=[], sources=sources)

    def load_dataset(name, subset, split, streaming, revision):
        found.asked.append((name, subset, split, revision))
        kind = 'parquet' if found.sources[0].endswith('parquet') else 'json'
        return local(kind, data_files=found.sources, split=split, streaming=streaming,
                     cache_dir=str(tmp_path / 'cache'))

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    monkeypatch.setattr(library.HfApi, 'dataset_info',
                        lambda self, name, revision: types.SimpleNamespace(sha=f'{revision}123'))
    prepare_data.open_hub.cache_clear()
    yield found
    prepare_data.open_hub.cache_clear()


def test_hub_rows_and_revision(tmp_path, monkeypatch, hub):
    folder, meta = prepare(tmp_path, corpus='books+wikipedia', name='')
    assert hub.asked == [('SamuelYang/bookcorpus', None, 'train', 'main123'),
                         ('wikimedia/wikipedia', '20231101.en', 'train', 'main123')]
    assert meta['name'] == 'books_wikipedia' and meta['left_out'][0] == 6 and len(units_of(folder)) == 6
    assert len(read_all(folder, meta)) == 3 * 1 + 3 * 31                # joined rows: a document a file
    monkeypatch.setattr('huggingface_hub.HfApi.dataset_info', lambda self, name, revision: 1 / 0)
    with pytest.raises(UserError, match='owner/name: cannot be read from the hub .*; without a network: '):
        prepare(tmp_path, corpus='owner/name', name='other')


def test_units_of_the_hub_are_row_groups_where_files_are_few(tmp_path, hub):
    arrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    hub.sources[:] = [str(tmp_path / f'{k}.parquet') for k in range(2)]
    rows = [text if i % 6 else f' = {i} = ' for i, text in enumerate(make_texts(60))]
    for source in hub.sources:
        parquet.write_table(arrow.table({'text': rows}), source, row_group_size=20)
    folder, meta = prepare(tmp_path, corpus='fineweb')
    assert len(units_of(folder)) == 6 and read_all(folder, meta) == sorted(2 * encoded(folder, rows))
    folder, meta = prepare(tmp_path, corpus='wikitext', name='joined', val_fraction=0.3)
    assert len(units_of(folder)) == 2 and len(read_all(folder, meta)) == 20     # no article is cut


# ---- units, parts and plans ----

def jsonl_files(folder):
    """Files of several sizes, rows without text among them; one is empty, one without any text."""
    (folder / 'files' / 'deep').mkdir(parents=True)
    for k in range(4):
        write_jsonl(folder / 'files' / f'{k}.jsonl', [*make_texts(70 * k, seed=k), None, '', 3])
    (folder / 'files' / '5.jsonl').write_bytes(b'')
    write_jsonl(folder / 'files' / 'deep' / '0.jsonl.gz', make_texts(80, seed=9), opener=gzip.open)
    return {'corpus': str(folder / 'files'), 'unit_bytes': 4000, 'val_fraction': 0.2}


def test_any_number_of_parts_and_processes(tmp_path, capfd):
    usual = jsonl_files(tmp_path)
    reference = contents(prepare(tmp_path / 'one', **usual)[0])
    assert 'unit_00009.json' in reference and not any(name.endswith('.tmp') for name in reference)
    assert contents(prepare(tmp_path / 'two processes', num_proc=2, **usual)[0]) == reference
    for i in (0, 2, 1):
        folder = prepare_data.prepare(knobs(tmp_path / 'parts', part=f'{i}/3', **usual))
        assert os.path.exists(f'{folder}/meta.json') == (i == 1)
    assert contents(folder) == reference
    assert 'part 2/3 is done; other parts have ' in capfd.readouterr().err


def test_parts_wait_for_part_0_and_say_so(tmp_path, monkeypatch, capfd):
    usual = jsonl_files(tmp_path)
    monkeypatch.setattr(time, 'sleep', lambda _: prepare_data.prepare(knobs(tmp_path, part='0/2', **usual)))
    folder = prepare_data.prepare(knobs(tmp_path, part='1/2', **usual))
    prepare_data.check_sizes(folder, prepare_data.load_meta(folder), sums=True)
    said, = (line for line in capfd.readouterr().err.splitlines() if 'part 1/2 waits' in line)
    assert said.endswith('which part 0 makes; if that has failed, repeat it')


def test_launchers_number_the_parts(tmp_path, monkeypatch):
    assert prepare_data.find_part(knobs(tmp_path)) == (0, 1)
    for rank, world, part in (('SLURM_PROCID', 'SLURM_NTASKS', '2/5'), ('RANK', 'WORLD_SIZE', '1/3')):
        monkeypatch.setenv(rank, part[0])
        monkeypatch.setenv(world, part[2])
        assert prepare_data.find_part(knobs(tmp_path)) == (int(part[0]), int(part[2]))
    assert prepare_data.find_part(knobs(tmp_path, part='3/9')) == (3, 9)


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


def test_validation_is_never_in_train(tmp_path):
    """Equal texts are on one side, in whatever units; a split that would be empty is one line."""
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', make_texts(100) * 3), 'unit_bytes': 20_000}
    folder, meta = prepare(tmp_path, **usual, val_fraction=0.2)
    train, val = read_split(folder, meta, 'train'), read_split(folder, meta, 'val')
    assert not set(train) & set(val) and len(train) + len(val) == 300
    assert 30 < len(val) < 90 and set(collections.Counter(val).values()) == {3}
    for fraction, empty in ((1e-9, 'val'), (1 - 1e-9, 'train')):
        with pytest.raises(UserError, match=f'leaves no document for {empty}: remove .*/units.json and'):
            prepare(tmp_path, **usual, val_fraction=fraction, name=empty)


def test_max_documents_are_the_first_of_each_unit(tmp_path):
    texts = make_texts(300)
    source = write_jsonl(tmp_path / 'a.jsonl', [None, *texts])
    folder, meta = prepare(tmp_path, corpus=source, unit_bytes=10_000, max_documents=50)
    units, direct, found = len(units_of(folder)), encoded(folder, texts), read_all(folder, meta)
    assert len(found) == units * -(-50 // units) and set(found) < set(direct) and direct[0] in found
    assert meta['left_out'][0] == 1


def test_a_sample_is_of_the_whole_corpus(tmp_path):
    """Texts of smallest hash from 16 units spread over the corpus, each by its bytes."""
    units = [unit_of(tmp_path, [], bytes=size) for size in (1000, 3000)]
    for k, unit in enumerate(units):
        file = write_jsonl(tmp_path / f'{k}.jsonl', [f'{k} {i:098}' for i in range(500)])
        unit['pieces'] = [[file, 0, None]]
    sample = prepare_data.take_sample(units, knobs(tmp_path, folder='', tokenizer_sample=1200))
    assert [text[0] for text in sample] == ['0'] * 3 + ['1'] * 9
    hashes = [prepare_data.text_hash(text, prepare_data.HASH_SEED) for text in sample]
    assert hashes[:3] == sorted(hashes[:3]) and any(int(text[2:]) > 15 for text in sample)
    assert all(int(text[2:]) < (30 if text[0] == '0' else 90) for text in sample)


# ---- mistakes and damage ----

@pytest.mark.parametrize('arguments, said', [
    ('--corpus=nowhere.jsonl', "corpus='nowhere.jsonl': no such file; choose one of docstrings,"),
    ('--corpus=good.jsonl --val_fraction=0', 'val_fraction=0.0: must be above 0 and at most 1'),
    ('--corpus=good.jsonl --tokenizer=wordpeice', "tokenizer='wordpeice': choose one of sentencepiece"),
    ('--corpus=good.jsonl --tokenizer=data/x', 'data/x: not prepared: run python prepare_data.py config/dat'),
    ('--corpus=cluecorpussmall', "corpus='cluecorpussmall' needs --path=<its files, their directory"),
    ('--corpus=good.jsonl --text_field=body', "text_field='body': the first row has id, text"),
    ('--corpus=data.csv', 'data.csv: no .txt, .json,'),
    ('--corpus=good.jsonl --vocab_size=90000', 'Vocabulary size too high'),
    ('--corpus=good.jsonl --tokenizer=tiktoken:nosuch', "tokenizer='tiktoken:nosuch'"),
    ('--corpus=good.jsonl --tokenizer=wordpiece:good.jsonl', "KeyError: '[PAD]'"),
    ('--corpus=good.jsonl --tokenizer=sentencepiece:good.jsonl', "tokenizer='sentencepiece:good.jsonl', v"),
    ('--corpus=good.jsonl --tokenizer=character:no.txt', 'no.txt'),
    ('--corpus=good.jsonl --data_dir=good.jsonl', 'good.jsonl'),
    ('--corpus=good.jsonl --segmenter=jeiba', "segmenter='jeiba': must be jieba, with tokenizer=wordpiece"),
    ('--corpus=good.jsonl --segmenter=jieba', "segmenter='jieba': must be jieba, with tokenizer=wordpiece"),
    ('--corpus=cut.jsonl.gz', 'cut.jsonl.gz: cannot be read: '),
    ('--path=nosuchpackage', "'nosuchpackage' is"),
    ('--corpus=good.jsonl --part=4/4', "part='4/4': must be i/n with i from 0 to n - 1, as in 0/4"),
    ('--corpus=good.jsonl --part=x/2', "part='x/2': must be i/n"),
    ('--corpus=texts --data_dir=.', 'texts lies in ./texts, into which it would be prepared: give'),
    ('--check=texts', 'texts: not prepared: run python prepare_data.py config/data_texts.py --data_dir=')])
def test_mistakes_are_one_line(tmp_path, monkeypatch, stage, arguments, said):
    """And leave nothing behind that a corrected command would trip over."""
    monkeypatch.chdir(tmp_path)
    good = write_jsonl('good.jsonl', make_texts(30))
    pathlib.Path('cut.jsonl.gz').write_bytes(gzip.compress(pathlib.Path(good).read_bytes())[:-20])
    pathlib.Path('data.csv').write_bytes(b'a,b\n')
    os.mkdir('texts')
    shutil.copy(good, 'texts/mine.jsonl')
    done = stage('prepare_data', '--num_proc=1', *arguments.split())
    lines = [line for line in done.err.splitlines() if ' units of ' not in line]
    assert said in refused(done._replace(err='\n'.join(lines)))
    assert os.listdir('texts') == ['mine.jsonl'] and not glob.glob('data/*/*.json')


def test_a_config_is_called_as_the_corpus_that_it_prepares():
    """As load_meta names it where the corpus is missing."""
    for name in (item[5:-3] for item in glob.glob('data_*.py', root_dir=f'{ROOT}/config')):
        config = configure(dict(vars(prepare_data)), [f'config/data_{name}.py'])
        assert name == config['name'] or name == prepare_data.find_corpus({**config, 'path': 'x'})[0]


@pytest.fixture(scope='module')
def sound(tmp_path_factory):
    """(knobs, folder) of a prepared corpus of several units, with words."""
    pytest.importorskip('jieba')
    home = tmp_path_factory.mktemp('sound')
    source = write_jsonl(home / 'a.jsonl', make_texts(60, 0, CHINESE, ''))
    usual = {'corpus': source, 'tokenizer': 'character', 'segmenter': 'jieba',
             'unit_bytes': 3000, 'val_fraction': 0.3}
    return usual, prepare(home, **usual)[0]


def copied(sound, tmp_path):
    (tmp_path / 'data').mkdir()
    return pathlib.Path(shutil.copytree(sound[1], tmp_path / 'data' / 'x'))


def flip(file, place=None, bit=0):
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1 << bit
    file.write_bytes(data)


def test_check_covers_every_file_and_names_what_mends_it(sound, tmp_path, stage):
    """The line names one file; without it, the command that prepared the corpus makes the same bytes."""
    home, reference = copied(sound, tmp_path), contents(sound[1])
    assert stage('prepare_data', f'--check={home}').err == f'{home}: all files are as they were written\n'
    names = [name for name in reference if '0000' not in name or '00001' in name]
    assert len(names) == 12 and {'units.json', 'tokenizer/vocab.txt', 'unit_00001.json'} < set(names)
    for name in names:
        flip(home / name)
        line = refused(stage('prepare_data', f'--check={home}'))
        assert f'{home}/{name}: missing, damaged or of another version: remove {home}/' in line
        os.remove(line.partition(': remove ')[2].partition(' and ')[0])
        assert contents(prepare(tmp_path, **sound[0])[0]) == reference, name


def test_a_run_checks_what_it_reads(sound, tmp_path):
    """Sizes, the tokenizer's files, and that starts ascend."""
    home, meta = copied(sound, tmp_path), prepare_data.load_meta(sound[1])
    for name in ('train_00000.bin', 'val_00001.idx', 'train_00002.words'):
        whole = (home / name).read_bytes()
        for data in (whole[:-1], whole + b'\0', None):
            (home / name).unlink() if data is None else (home / name).write_bytes(data)
            with pytest.raises(UserError, match=f'{name}: missing, damaged'):
                prepare_data.check_sizes(str(home), meta)
        (home / name).write_bytes(whole)
    prepare_data.check_sizes(str(home), meta)
    for name, place, bit in (('train_00000.idx', 9, 7), ('train_00000.idx', -6, 0), ('train_00000.idx', 0, 0),
                             ('tokenizer/word_start.bin', 9, 0), ('tokenizer/vocab.txt', 40, 1)):
        flip(home / name, place, bit)
        with pytest.raises(UserError, match=f'{name}: missing, damaged'):
            prepare_data.check_sizes(str(home), meta)
        flip(home / name, place, bit)


def test_any_flipped_bit_of_meta_is_one_line(sound, tmp_path):
    (tmp_path / 'meta.json').write_bytes(whole := pathlib.Path(sound[1], 'meta.json').read_bytes())
    assert prepare_data.load_meta(str(tmp_path))['special'] and len(whole) > 3000
    for place in range(0, len(whole), 25):
        flip(tmp_path / 'meta.json', place, place % 8)
        with pytest.raises(UserError, match='/meta.json: missing, damaged or .*: remove .*/meta.json and'):
            prepare_data.load_meta(str(tmp_path))
        (tmp_path / 'meta.json').write_bytes(whole)


@pytest.mark.parametrize('name', ['settings.json', 'sentencepiece.model'])
def test_a_damaged_tokenizer_of_a_run_is_named_alone(tmp_path, name):
    """The folder of a run holds checkpoints: nothing tells a person to remove it."""
    folder, _ = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(60)))
    run = str(tmp_path / 'out')
    prepare_data.copy_tokenizer(prepare_data.load_tokenizer(folder), run)
    assert encoded(run, ['red house']) == encoded(folder, ['red house'])
    flip(tmp_path / 'out' / 'tokenizer' / name)
    with pytest.raises(UserError, match=f'out/tokenizer/{name}: .*its corpus, data/NAME, holds') as error:
        prepare_data.load_tokenizer(run)
    assert 'remove' not in str(error.value)


def test_a_file_is_replaced_once_it_is_complete(tmp_path):
    file = tmp_path / 'a.bin'
    prepare_data.write_bytes(file, b'old')
    output = prepare_data.Output(file)
    output.write(b'new')
    assert file.read_bytes() == b'old'
    output.finish()
    assert file.read_bytes() == b'new' and os.listdir(tmp_path) == ['a.bin']


# ---- real processes ----

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """(words of the command line, contents of the folder that it prepares)."""
    home = tmp_path_factory.mktemp('undisturbed')
    (home / 'source').mkdir()
    for k in range(4):
        write_jsonl(home / 'source' / f'{k}.jsonl', [*make_texts(1500, seed=k), None])
    line = ['prepare_data.py', *words(corpus=home / 'source', name='x', vocab_size=60, num_proc=2,
                                      val_fraction=0.1, tokenizer_sample=100_000, unit_bytes=30_000)]
    assert process(*line, f'--data_dir={home}').code == 0
    return line, contents(home / 'x')


def group_is_gone(group, seconds=10):
    """Whether no process of the group is left, workers included."""
    for _ in range(20 * seconds):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


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
    started.communicate(timeout=60)
    assert group_is_gone(started.pid) and started.returncode != 0
    done = {item: os.stat(item).st_mtime_ns for item in glob.glob(f'{tmp_path}/x/unit_0*.json')}
    assert process(*line, f'--data_dir={tmp_path}').code == 0
    assert {name: data for name, data in contents(tmp_path / 'x').items() if '.tmp' not in name} == reference
    assert done == {item: os.stat(item).st_mtime_ns for item in done}


@pytest.mark.slow
@pytest.mark.parametrize('share', [0.05, 0.5, 0.95])
def test_limit_on_the_size_of_files(tmp_path, undisturbed, share):
    resource = pytest.importorskip('resource')
    line, reference = undisturbed
    limit = int(share * len(reference['train_00000.bin']))
    started = launch(*line, f'--data_dir={tmp_path}',
                     preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    said = started.communicate(timeout=60)[1].splitlines()
    assert started.returncode == 2
    assert said[-1].endswith(': File too large') and 'Traceback' not in '\n'.join(said)
    assert process(*line, f'--data_dir={tmp_path}').code == 0
    assert contents(tmp_path / 'x').items() >= reference.items()


@pytest.mark.slow
def test_torchrun_and_srun_prepare_parts(tmp_path, undisturbed):
    """The processes start at once; part 0 makes the plan."""
    line, reference = undisturbed
    assert torchrun(*line, f'--data_dir={tmp_path}/torchrun').code == 0
    started = [launch(*line, f'--data_dir={tmp_path}/srun',
                      env={'SLURM_PROCID': rank, 'SLURM_NTASKS': '2'}) for rank in '10']
    try:
        assert [one.wait(100) for one in started] == [0, 0]
    finally:
        for one in started:
            kill(one)
    for launcher in ('torchrun', 'srun'):
        assert contents(tmp_path / launcher / 'x') == reference
