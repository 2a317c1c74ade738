"""prepare_data.py: byte-equal results, every bad row counted, nothing lost, nothing held out that trains."""
import base64
import collections
import gzip
import hashlib
import itertools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tarfile
import time
import tracemalloc
import types
import unicodedata

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import prepare_data  # noqa: E402
from configurator import UserError, is_knob  # noqa: E402

pytest.importorskip('sentencepiece')
WORDS = ['red', 'green', 'blue', 'small', 'large', 'quick', 'slow', 'river', 'mountain', 'house', 'walks',
         'sings', 'reads', 'under', 'over', 'the', 'of', 'and', '[MASK]']
VOCAB = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '[', ']', 'mask', 'the', 'of', 'and', 'red', 'ri',
         '##ver', 'walks']
DEFAULTS = {name: value for name, value in vars(prepare_data).items() if is_knob(name, value)}


def knobs(folder, **changes):
    usual = {'data_dir': str(folder / 'data'), 'name': 'x', 'vocab_size': 60, 'num_proc': 1}
    return DEFAULTS | usual | changes


def prepare(folder, **changes):
    """Returns (folder, meta) of a prepared corpus."""
    made = prepare_data.prepare(knobs(folder, **changes))
    return made, prepare_data.load_meta(made)


def make_texts(count, seed=0):
    """Texts of 3 to 60 words, all different."""
    pick = random.Random(seed)
    return [f'{i} ' + ' '.join(pick.choices(WORDS, k=pick.randint(3, 60))) for i in range(count)]


def write_jsonl(file_name, texts, field='text', opener=open):
    with opener(file_name, 'wb') as file:
        for text in texts:
            file.write(json.dumps({'id': 1, field: text}).encode() + b'\n')
    return str(file_name)


def read_split(folder, meta, split):
    """The documents of a split as tuples of ids without [SEP]; checks the offsets on the way."""
    documents = []
    for shard in meta['splits'][split]['shards']:
        ids = np.fromfile(os.path.join(folder, shard['tokens']), np.dtype(meta['dtype']).newbyteorder('<'))
        starts = np.fromfile(os.path.join(folder, shard['documents']), '<i8')
        assert starts[0] == 0 and starts[-1] == len(ids) == shard['n_tokens']
        assert len(starts) - 1 == shard['n_documents']
        assert np.array_equal(starts[1:] - 1, np.flatnonzero(ids == meta['special']['sep']))
        documents += [tuple(ids[a:b - 1].tolist()) for a, b in zip(starts, starts[1:], strict=False)]
    assert len(documents) == meta['splits'][split]['documents']
    return documents


def contents(folder):
    return {name: open(os.path.join(folder, name), 'rb').read() for name in sorted(os.listdir(folder))}


def tiktoken_file(folder):
    """The 256 bytes and one merge in tiktoken's format."""
    tokens = [bytes([i]) for i in range(256)] + [b' t', b'he']
    lines = [base64.b64encode(token) + b' %d\n' % rank for rank, token in enumerate(tokens)]
    (folder / 'tiny.tiktoken').write_bytes(b''.join(lines))
    return f'tiktoken:{folder}/tiny.tiktoken'


def wordpiece_file(folder):
    (folder / 'vocab.txt').write_text('\n'.join(VOCAB) + '\n')
    return f'wordpiece:{folder}/vocab.txt'


SPECS = {'sentencepiece': lambda folder: 'sentencepiece', 'wordpiece': wordpiece_file,
         'character': lambda folder: 'character', 'tiktoken': tiktoken_file}
NEEDS = {'sentencepiece': 'sentencepiece', 'wordpiece': 'tokenizers', 'character': 'tokenizers',
         'tiktoken': 'tiktoken', 'jieba': 'jieba'}


def test_same_bytes_for_any_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'BATCH_BYTES', 2000)
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(300))
    made = [contents(prepare(tmp_path / str(n), corpus=source, num_proc=n)[0]) for n in (1, 2, 3, 1)]
    assert made[0] == made[1] == made[2] == made[3]


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_every_document_once_and_literal_mask_is_text(tmp_path, kind):
    pytest.importorskip(NEEDS[kind])
    texts = make_texts(300) + ['the red [MASK] walks']
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=SPECS[kind](tmp_path))
    tokenizer = prepare_data.load_tokenizer(folder, meta)
    train, val = read_split(folder, meta, 'train'), read_split(folder, meta, 'val')
    direct = [tuple(tokenizer.encode(text)) for text in texts]
    assert collections.Counter(train + val) == collections.Counter(direct)
    assert train != sorted(train, key=direct.index)                             # shuffled
    assert tokenizer.encode_batch(texts[:5]) == [tokenizer.encode(text) for text in texts[:5]]
    ids = tokenizer.encode('the red [MASK] walks')
    assert not set(ids) & set(tokenizer.special.values())
    assert 'mask' in tokenizer.decode(ids).lower() and tokenizer.piece(tokenizer.special['mask']) == '[MASK]'
    assert tokenizer.vocab_size == meta['vocab_size'] > max(tokenizer.special.values())
    assert set(tokenizer.special) - {'unk'} == {'pad', 'cls', 'sep', 'mask'}
    assert ('unk' in tokenizer.special) == (kind != 'tiktoken')


def test_meta_counts_entropy_and_digests(tmp_path):
    folder, meta = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(500)))
    train = np.concatenate([np.array(ids) for ids in read_split(folder, meta, 'train')])
    share = np.unique(train, return_counts=True)[1] / len(train)
    assert meta['unigram_entropy'] == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)
    assert meta['splits']['train']['tokens'] == len(train) + meta['splits']['train']['documents']
    for name, data in contents(folder).items():
        if name != 'meta.json':
            assert meta['files'][name] == {'bytes': len(data), 'sha256': hashlib.sha256(data).hexdigest()}
    assert sorted(os.listdir(folder)) == sorted([*meta['files'], 'meta.json'])
    assert meta['special'] == {'pad': 0, 'unk': 1, 'cls': 2, 'sep': 3, 'mask': 4}


def test_validation_is_never_in_train(tmp_path):
    texts = make_texts(200) * 3
    folder, meta = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', texts), val_fraction=0.2)
    train, val = read_split(folder, meta, 'train'), read_split(folder, meta, 'val')
    assert not set(train) & set(val) and len(train) + len(val) == 600
    assert 60 < len(val) < 180 and all(count == 3 for count in collections.Counter(val).values())
    source = str(tmp_path / 'a.jsonl')
    _, few = prepare(tmp_path, corpus=source, val_fraction=0.2, val_documents=10, name='few')
    assert few['splits']['val']['documents'] == 9                       # three texts, each three times
    _, one = prepare(tmp_path, corpus=str(tmp_path / 'a.jsonl'), val_fraction=1e-9, name='one')
    assert one['splits']['val']['documents'] == 3


def test_shards_end_at_the_limit(tmp_path):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(300) + ['red ' * 2000])
    folder, meta = prepare(tmp_path, corpus=source, shard_bytes=1000)
    shards = meta['splits']['train']['shards']
    assert len(shards) > 10
    assert all(shard['n_tokens'] * 2 <= 1000 or shard['n_documents'] == 1 for shard in shards)
    whole = prepare(tmp_path, corpus=source, name='whole')
    assert read_split(folder, meta, 'train') == read_split(*whole, 'train')


def test_large_vocabulary_is_uint32(tmp_path):
    pytest.importorskip('tokenizers')
    (tmp_path / 'vocab.txt').write_text('\n'.join(VOCAB + [f'w{i}' for i in range(66000)]))
    source = write_jsonl(tmp_path / 'a.jsonl', [f'the w{i} w{65990 + i % 10}' for i in range(50)])
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=f'wordpiece:{tmp_path}/vocab.txt')
    assert meta['dtype'] == 'uint32'
    assert max(max(ids) for ids in read_split(folder, meta, 'train')) > 65536


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_word_starts(tmp_path, kind):
    pytest.importorskip(NEEDS[kind])
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(100))
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=SPECS[kind](tmp_path))
    starts = np.fromfile(os.path.join(folder, 'word_start.bin'), np.uint8)
    tokenizer = prepare_data.load_tokenizer(folder, meta)
    pieces = [tokenizer.piece(item) for item in range(tokenizer.vocab_size)]
    rule = {'sentencepiece': lambda piece: piece[:1] == '\u2581',
            'wordpiece': lambda piece: piece[:2] != '##', 'character': lambda piece: piece[:2] != '##',
            'tiktoken': lambda piece: not piece[:1].isalnum() and piece[:1] != '\ufffd'}[kind]
    specials = set(tokenizer.special.values())
    assert starts.tolist() == [int(item in specials or rule(piece)) for item, piece in enumerate(pieces)]
    assert 0 < starts.sum() < len(starts)


def test_characters_by_falling_frequency(tmp_path):
    pytest.importorskip('tokenizers')
    source = write_jsonl(tmp_path / 'a.jsonl', ['好好好好好，，，，Ba b\u3000A', '人人人人é～～～Ｚ'])
    folder, meta = prepare(tmp_path, corpus=source, tokenizer='character', val_fraction=0.4)
    # 好 5, ， and 人 4 (U+4EBA is before U+FF0C), ～ 3, a and b 2, e and ｚ 1; white space is no piece
    pieces = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '好', '人', '，', '～', '##～', 'a', '##a', 'b',
              '##b', 'e', '##e', 'ｚ', '##ｚ']
    assert contents(folder)['vocab.txt'].decode() == '\n'.join([*pieces, ''])
    tokenizer = prepare_data.load_tokenizer(folder, meta)
    assert [tokenizer.piece(item) for item in tokenizer.encode('Bé好baz')] == ['b', '##e', '好', '[UNK]']
    usual = {'corpus': source, 'tokenizer': 'character', 'val_fraction': 0.4}
    cut, _ = prepare(tmp_path, **usual, vocab_size=17, name='cut')     # no piece without its '##' piece
    assert contents(cut)['vocab.txt'].decode() == '\n'.join([*pieces[:16], ''])
    cased, _ = prepare(tmp_path, **usual, lower_case=False, name='cased')
    assert {'A', '##A', 'B', 'a', 'é', 'Ｚ'} < set(contents(cased)['vocab.txt'].decode().split('\n'))


def test_characters_of_a_given_vocabulary(tmp_path):
    pytest.importorskip('tokenizers')
    pieces = ['[PAD]', '\u2028', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '我', '好', 'model', '##s', '\x85']
    (tmp_path / 'vocab.txt').write_bytes('\r\n'.join(pieces).encode() + b'\r\n')
    source = write_jsonl(tmp_path / 'a.jsonl', [f'我models好{i}' for i in range(20)])
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=f'character:{tmp_path}/vocab.txt')
    assert meta['vocab_size'] == 11 and meta['special'] == {'pad': 0, 'unk': 2, 'cls': 3, 'sep': 4, 'mask': 5}
    assert set(read_split(folder, meta, 'train')) == {(6, 8, 9, 7, 2)}
    assert contents(folder)['vocab.txt'] == (tmp_path / 'vocab.txt').read_bytes()


def test_cjk_characters_are_those_that_the_normaliser_sets_apart():
    tokenizers = pytest.importorskip('tokenizers')
    normalize = tokenizers.normalizers.BertNormalizer(strip_accents=False).normalize_str
    near = [int(edge) + step for edge in prepare_data.CJK for step in (-2, -1, 0, 1)]
    points = [*range(0x2000), *range(0x2E00, 0x3500), *near, 0x20BB7, 0x2B820, 0x30000]
    apart = [normalize(chr(point)) == f' {chr(point)} ' for point in points]
    assert prepare_data.is_cjk(np.array(points)).tolist() == apart and any(apart)


CHINESE = ['宝玉', '黛玉', '林妹妹', '笑道', '我们', '的', '北京', '来到', 'T恤', 'models', 'Bert', 'Éa',
           '２０', 'ＡＢ', '，', '。“', ' ', '\u3000\u3000', '\r\n', '\u200b', '𠮷', '\uf900', 'は', '㈱',
           '~~', '[MASK]']


def make_chinese(count, seed=0):
    """Texts of 3 to 60 words in two languages, all different."""
    pick = random.Random(seed)
    return [f'第{i}回' + ''.join(pick.choices(CHINESE, k=pick.randint(3, 60))) for i in range(count)]


def words_by_hand(text, tokens, starts):
    """Where words start, token by token; `tokens` are (piece, begin, end) in the text."""
    words, before = [], 0
    for place, (piece, begin, end) in enumerate(tokens):
        chinese = unicodedata.name(text[begin], '').startswith('CJK ')
        by_segmenter = place == 0 or any(before <= start <= begin for start in starts)
        words.append(by_segmenter if chinese else not piece.startswith('##'))
        before = end
    return words


@pytest.mark.parametrize('text, starts, tokens', [
    ('我们用BERT模型。', [0, 2, 3, 7, 9], '|我 们 |用 |b ##e ##r ##t |模 型 |。'),
    ('买T恤, 好  模\u3000型', [0, 1, 3, 4, 5, 6, 8, 9, 10], '|买 |t 恤 |, |好 |模 |型'),
    ('\u200b\n我们们', [0, 4], '|我 们 |们'), ('é模\u200b\u200b型ＡＢ', [0, 3], '|e 模 |型 |ａ ##ｂ'),
    ('b我龘', [0], '|b 我 [UNK]'), ('我𠮷b', [0, 1, 2], '|我 |𠮷 |b')])
def test_words_of_mixed_text(tmp_path, text, starts, tokens):
    pytest.importorskip('tokenizers')
    source = write_jsonl(tmp_path / 'a.jsonl', ['我们用模型买恤好𠮷bert，。,ａｂ', '们'])
    folder, meta = prepare(tmp_path, corpus=source, tokenizer='character', val_fraction=0.4)
    tokenizer = prepare_data.load_tokenizer(folder, meta)
    (ids, offsets), = tokenizer.encode_offsets([text])
    words = prepare_data.mark_words(text, ids, offsets, starts, np.array(tokenizer.word_starts()))
    marked = ' '.join('|' * bool(word) + tokenizer.piece(item) for item, word in zip(ids, words, strict=True))
    assert marked == tokens and ids == tokenizer.encode(text)


def test_starts_of_sentencepiece_are_in_the_text_as_given(tmp_path):
    config, texts = knobs(tmp_path, segmenter_vocab=90), make_chinese(200)
    information = prepare_data.SentencePieceSegmenter.save(tmp_path, '', config, texts)
    segmenter = prepare_data.load_segmenter(tmp_path, {'segmenter': information})
    skipped, longest = dict.fromkeys(map(ord, ' \r\n\u200b')), 0
    for text in (text.replace('㈱', 'x') for text in texts[:50]):       # it makes pieces within a character
        pieces, starts = segmenter.model.encode(text, out_type=str), segmenter.starts(text)
        for piece, start in zip(pieces, starts, strict=True):
            rest = unicodedata.normalize('NFKC', text[start:]).casefold().translate(skipped)
            assert rest.startswith(piece.replace('\u2581', '')), (piece, start, text)
            longest = max(longest, len(piece))
    assert longest >= 3 and segmenter.starts('') == []


def test_jieba_of_a_known_sentence(tmp_path, monkeypatch, capfd):
    pytest.importorskip('jieba', reason='segmenter=jieba needs the package jieba')
    monkeypatch.setattr('tempfile.tempdir', str(tmp_path))
    segmenter = prepare_data.JiebaSegmenter(str(tmp_path), {})
    text = '我来到北京清华大学'                                 # the first example of jieba's README
    starts = segmenter.starts(text)
    assert [text[a:b] for a, b in itertools.pairwise(starts)] == ['我', '来到', '北京', '清华大学']
    assert all(segmenter.starts(text)[-1] == len(text) for text in make_chinese(50))    # nothing is dropped
    assert capfd.readouterr() == ('', '') and not os.listdir(tmp_path)      # neither messages nor a cache


@pytest.mark.parametrize('kind', [kind for kind in prepare_data.SEGMENTERS if kind])
def test_words_stay_with_their_tokens(tmp_path, monkeypatch, kind):
    pytest.importorskip('tokenizers')
    pytest.importorskip(NEEDS[kind])
    for name, value in (('BATCH_BYTES', 2000), ('FLUSH_BYTES', 5000), ('WRITE_BYTES', 500)):
        monkeypatch.setattr(prepare_data, name, value)
    texts = make_chinese(200) + make_chinese(3)                 # some twice
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    usual = {'corpus': source, 'tokenizer': 'character', 'vocab_size': 100, 'val_fraction': 0.2}
    folder, meta = prepare(tmp_path, **usual, segmenter=kind, segmenter_vocab=90, shard_bytes=1500)
    tokenizer = prepare_data.load_tokenizer(folder, meta)
    segmenter = prepare_data.load_segmenter(folder, meta)
    expected = collections.Counter()
    for text, (ids, offsets) in zip(texts, tokenizer.encode_offsets(texts), strict=True):
        tokens = [(tokenizer.piece(item), *where) for item, where in zip(ids, offsets.tolist(), strict=True)]
        expected[tuple(ids), tuple(words_by_hand(text, tokens, segmenter.starts(text)))] += 1
    found = collections.Counter()
    for split, part in meta['splits'].items():
        words = [np.fromfile(os.path.join(folder, shard['words']), np.uint8) for shard in part['shards']]
        assert [len(item) for item in words] == [shard['n_tokens'] for shard in part['shards']]
        assert len(words) > 2
        words, start = np.concatenate(words), 0
        for ids in read_split(folder, meta, split):
            found[ids, tuple(words[start:start + len(ids)].astype(bool).tolist())] += 1
            assert words[start + len(ids)] == 1                 # [SEP]
            start += len(ids) + 1
        assert start == len(words) and set(words) == {0, 1}
    assert found == expected
    plain, without = prepare(tmp_path, **usual, shard_bytes=1500, name='plain')
    same = {name: data for name, data in contents(folder).items() if name.endswith(('.bin', '.idx', '.txt'))}
    assert same == {name: data for name, data in contents(plain).items() if name != 'meta.json'}
    assert 'segmenter' not in without and set(meta) - set(without) == {'segmenter'}


def test_same_words_for_any_number_of_processes(tmp_path, monkeypatch):
    pytest.importorskip('tokenizers')
    monkeypatch.setattr(prepare_data, 'BATCH_BYTES', 2000)
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', make_chinese(200)), 'tokenizer': 'character'}
    made = [prepare(tmp_path / str(n), **usual, num_proc=n, segmenter='sentencepiece', segmenter_vocab=90)[0]
            for n in (1, 3)]
    assert contents(made[0]) == contents(made[1])
    given = f'sentencepiece:{made[0]}/segmenter.model'
    again, meta = prepare(tmp_path / 'given', **usual, segmenter=given)
    assert contents(again)['train_00000.words'] == contents(made[0])['train_00000.words']
    assert meta['segmenter'] == {'kind': 'sentencepiece', 'trained': False}


@pytest.mark.parametrize('package, changes', [('jieba', {'segmenter': 'jieba'}), ('tokenizers', {}),
                                              ('sentencepiece', {'segmenter': 'sentencepiece'})])
def test_missing_package_is_named(tmp_path, monkeypatch, package, changes):
    source = write_jsonl(tmp_path / 'a.jsonl', make_chinese(20))
    for name in ('tokenizers', 'jieba', 'sentencepiece'):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f'needs the package {package}: pip install {package}$'):
        prepare(tmp_path, corpus=source, tokenizer='character', **changes)


BAD = {                                                         # line of a .jsonl: kind it is counted as
    b'{"text": null}': 'null', b'{"text": 3}': 'not a string', b'{"text": " \\n"}': 'empty',
    b'{"text": "a\\ud800b"}': 'lone surrogate', b'{"text": "a\\u0000b"}': 'NUL',
    b'{"text": "\xff"}': 'invalid UTF-8',
    b'{"text": "' + b'a' * 10**7 + b'"}': 'too long', b'{"text": "cut': 'broken JSON',
    b'[1, 2]': 'not an object',
    b'{"title": "x"}': 'missing field', b'[' * 100_000: 'broken JSON'}


def test_bad_rows_are_counted_and_named(tmp_path, capfd):
    good = [json.dumps({'text': text}).encode() for text in make_texts(100)]
    (tmp_path / 'a.jsonl').write_bytes(b'\xef\xbb\xbf' + b'\n'.join([*good[:50], *BAD, b'', *good[50:]]))
    _, meta = prepare(tmp_path, corpus=str(tmp_path / 'a.jsonl'))
    assert meta['skipped'] == collections.Counter(BAD.values())
    assert meta['splits']['train']['documents'] + meta['splits']['val']['documents'] == 100
    said = capfd.readouterr().err
    for line, kind in enumerate(list(BAD.values())[:5], 51):
        assert f'a.jsonl:{line}: {kind}\n' in said
    assert said.count('skipped ') == 6


def test_bad_rows_of_the_other_formats(tmp_path):
    arrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    texts, corpus = make_texts(60), tmp_path / 'corpus'
    corpus.mkdir()
    column = arrow.array([text.encode() for text in texts] + [b'\xff', None, b''], arrow.binary())
    column = arrow.StringArray.from_buffers(len(column), *column.buffers()[1:], column.buffers()[0])
    parquet.write_table(arrow.table({'text': column, 'n': range(len(column))}), corpus / 'a.parquet')
    (corpus / 'b.txt').write_bytes('\ufeffred house\n'.encode() + b'\xff\nmore\n\0\n')
    write_jsonl(corpus / 'c.jsonl.gz', texts, opener=gzip.open)
    cut = (corpus / 'c.jsonl.gz').read_bytes()
    (corpus / 'c.jsonl.gz').write_bytes(cut[:-9])
    (corpus / 'd.parquet').write_bytes(b'no parquet')
    (corpus / 'e').write_text('a file without an ending is text')
    _, meta = prepare(tmp_path, corpus=str(corpus))
    assert meta['skipped'] == {'NUL': 1, 'broken archive': 1, 'broken parquet': 1, 'empty': 1,
                               'invalid UTF-8': 2, 'null': 1}


def test_readers_agree(tmp_path):
    texts = make_texts(40)
    for name in ('jsonl', 'gz', 'txt'):
        (tmp_path / name / 'deep').mkdir(parents=True)
    write_jsonl(tmp_path / 'jsonl' / 'a.jsonl', texts)
    write_jsonl(tmp_path / 'gz' / 'deep' / 'a.jsonl.gz', texts, opener=gzip.open)
    for i, text in enumerate(texts):
        (tmp_path / 'txt' / 'deep' / f'{i}.txt').write_text(text)
    sources = {'plain': 'jsonl/a.jsonl', 'gz': 'gz', 'txt': 'txt', 'glob': '*sonl/*.jsonl',
               'deep': 'gz/**/*.gz'}
    made = {name: prepare(tmp_path, corpus=str(tmp_path / source), name=name, tokenizer='sentencepiece')
            for name, source in sources.items()}
    documents = {name: sorted(read_split(*pair, 'train')) for name, pair in made.items()}
    assert all(found == documents['plain'] for found in documents.values()) and len(documents['plain']) >= 38


def test_zst_and_parquet(tmp_path):
    zstandard, arrow = pytest.importorskip('zstandard'), pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    texts = make_texts(40)
    data = pathlib.Path(write_jsonl(tmp_path / 'a.jsonl', texts, 'body')).read_bytes()
    half = data.index(b'\n', len(data) // 2) + 1
    frames = [zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])]
    (tmp_path / 'a.jsonl.zst').write_bytes(b''.join(frames))
    parquet.write_table(arrow.table({'n': range(40), 'body': texts}), tmp_path / 'a.parquet')
    made = [prepare(tmp_path, corpus=str(tmp_path / item), name=item, text_field='body')
            for item in ('a.jsonl', 'a.jsonl.zst', 'a.parquet')]
    documents = [read_split(*pair, 'train') for pair in made]
    assert documents[0] == documents[1] == documents[2]
    with pytest.raises(UserError, match="text_field='text': no row .* n, body"):
        prepare(tmp_path, corpus=str(tmp_path / 'a.parquet'), name='none')


def test_long_text_file_is_cut_at_blank_lines(tmp_path):
    parts = [f'part {i} ' + 'red house ' * 30 for i in range(20)]
    (tmp_path / 'a.txt').write_text('\n\n'.join(parts))
    config = knobs(tmp_path, max_bytes=1000)
    rows = list(prepare_data.read_txt(str(tmp_path / 'a.txt'), config, None))
    assert [bad for _, _, bad in rows] == [''] * len(rows) and len(rows) == 7
    assert ''.join(text for _, text, _ in rows) == '\n\n'.join(parts)
    assert all(text.startswith('part') for _, text, _ in rows)
    assert rows[1][0] == 1 + 2 * rows[0][1].count('part')


def test_rows_are_joined():
    rows = [(f'f:{i}', text, bad) for i, (text, bad) in enumerate(
        [(' = A = \n', ''), ('', 'empty'), ('one\n', ''), (' = = s = = \n', ''), (' = B = \n', ''),
         ('', 'NUL'), ('two', '')])]
    assert list(prepare_data.join_rows(rows, '^ = [^=]', 10**6)) == [
        ('f:0', ' = A = \none\n = = s = = ', ''), ('f:5', '', 'NUL'), ('f:4', ' = B = \ntwo', '')]
    joined = [text for _, text, bad in prepare_data.join_rows(rows, 2, 10**6) if not bad]
    assert [text.count('\n') for text in joined] == [1, 1, 0]
    assert all(len(text) < 20 for _, text, bad in prepare_data.join_rows(rows, 9, 60))


def test_oscar_filter_on_both_schemas(tmp_path):
    english = {'identification': {'label': 'en', 'prob': 0.9}}
    cases = [(english, ''), (dict(english, annotation=None), ''),
             (dict(english, annotation=['tiny']), 'quality warning'),
             (dict(english, quality_warnings=['header']), 'quality warning'),
             (dict(english, harmful_pp=4.9), 'harmful_pp'),
             (dict(english, harmful_pp=100_001.0), 'harmful_pp'),
             (dict(english, harmful_pp=5.0, categories=['blog']), ''),
             (dict(english, quality_warnings=None, categories=['blog', 'sect']), 'blocked category'),
             ({'identification': {'label': 'fr'}}, 'not English')]
    with open(tmp_path / 'a.jsonl', 'w') as file:
        for copy in range(10):
            for i, (metadata, _) in enumerate(cases):
                print(json.dumps({'content': make_texts(90)[9 * copy + i], 'metadata': metadata}), file=file)
    folder, meta = prepare(tmp_path, corpus='oscar', path=str(tmp_path / 'a.jsonl'))
    expected = collections.Counter(f'filtered: {reason}' for _, reason in cases if reason)
    assert meta['skipped'] == {reason: 10 * count for reason, count in expected.items()}
    assert len(read_split(folder, meta, 'train') + read_split(folder, meta, 'val')) == 30


def test_docstrings_of_a_package(tmp_path, monkeypatch):
    text = 'A sentence that is long enough to be kept, number {}.'
    package = tmp_path / 'tinypackage'
    package.mkdir()
    (package / '__init__.py').write_text(
        f'"""{text.format(1)}"""\nclass A:\n    """{text.format(2)}\n\n    more\n    """\n'
        f'    async def f(self):\n        """{text.format(1)}"""\n        """{text.format(9)}"""\n')
    (package / 'b.py').write_text(
        f'raise OSError\nif x:\n    def f():\n        "{text.format(3)}"\n'
        f'add_newdoc("a", "b", """{text.format(4)}{text.format(5)}""")\n'
        f'f = lambda: 1\ndef g():\n    "short"\n')
    (package / 'c.py').write_text('def broken(:\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    config, progress = knobs(tmp_path), prepare_data.Progress()
    _, rows, origin = prepare_data.read_docstrings('tinypackage', config, progress)
    rows = list(rows(0))
    assert sorted(row[1] for row in rows if not row[2]) == sorted(
        [text.format(1), text.format(2) + '\n\nmore', text.format(3), text.format(4) + text.format(5)])
    assert [row for row in rows if row[2]] == [('tinypackage/c.py:1', '', 'does not parse')]
    assert origin == {'packages': {'tinypackage': ''}, 'files': 3} and 'tinypackage' not in sys.modules
    with pytest.raises(UserError, match='pip install nosuchpackage'):
        prepare_data.read_docstrings('nosuchpackage', config, progress)


def test_hub_rows_revision_and_errors(tmp_path, monkeypatch):
    datasets, hub = pytest.importorskip('datasets'), pytest.importorskip('huggingface_hub')
    source = write_jsonl(tmp_path / 'a.jsonl', [*make_texts(50), None])
    local, asked = datasets.load_dataset, []

    def load_dataset(name, subset, split, streaming, revision):
        asked.append((name, subset, split, revision))
        cache = str(tmp_path / 'cache')
        return local('json', data_files=source, split=split, streaming=streaming, cache_dir=cache)

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    facts = types.SimpleNamespace(sha='abc123')
    monkeypatch.setattr(hub.HfApi, 'dataset_info', lambda self, name, revision: facts)
    _, meta = prepare(tmp_path, corpus='wikipedia')
    assert asked == [('wikimedia/wikipedia', '20231101.en', 'train', 'abc123')]
    assert meta['source']['revision'] == 'abc123' and meta['skipped'] == {'null': 1}
    folder, meta = prepare(tmp_path, corpus='books+wikipedia', name='')
    books, wikipedia = meta['source']['parts']
    assert (books['hub'], wikipedia['hub']) == ('SamuelYang/bookcorpus', 'wikimedia/wikipedia')
    assert asked[1:] == [('SamuelYang/bookcorpus', None, 'train', 'abc123'), asked[0]]
    assert meta['name'] == 'books_wikipedia' and meta['skipped'] == {'null': 2}
    assert len(read_split(folder, meta, 'train') + read_split(folder, meta, 'val')) == 1 + 50
    monkeypatch.setattr(hub.HfApi, 'dataset_info', lambda self, name, revision: 1 / 0)
    with pytest.raises(UserError, match='owner/name: the Hugging Face hub .* ZeroDivisionError'):
        prepare(tmp_path, corpus='owner/name', name='other')


def command(folder, *arguments):
    line = [sys.executable, os.path.join(ROOT, 'prepare_data.py'), f'--data_dir={folder}/data', *arguments]
    return subprocess.Popen(line, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=dict(os.environ, HF_HUB_OFFLINE='1'))


@pytest.mark.skipif(not hasattr(signal, 'SIGKILL'), reason='kill -9 is a POSIX signal')
def test_killed_run_repeated_equals_an_undisturbed_one(tmp_path):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(20_000))
    (tmp_path / 'ref').mkdir()
    arguments = [f'--corpus={source}', '--name=x', '--vocab_size=60', '--num_proc=2',
                 '--tokenizer_sample=100000']
    process = command(tmp_path, *arguments)
    work = tmp_path / 'data' / 'x.tmp'
    while process.poll() is None and not (work / 'buckets').exists():
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert (work / 'buckets').exists() and not (tmp_path / 'data' / 'x').exists()
    again, reference = command(tmp_path, *arguments), command(tmp_path / 'ref', *arguments)
    assert again.communicate() and reference.communicate() and again.returncode == reference.returncode == 0
    assert contents(tmp_path / 'data' / 'x') == contents(tmp_path / 'ref' / 'data' / 'x')
    assert os.listdir(tmp_path / 'data') == ['x']


@pytest.mark.parametrize('arguments, said', [
    (['--corpus=nowhere.jsonl'], "corpus='nowhere.jsonl': no such file; choose one of docstrings,"),
    (['--corpus=.', '--val_fraction=2'], 'val_fraction=2.0: must lie between 0 and 1 (0.01 is usual)'),
    (['--corpus=.', '--tokenizer=wordpeice'], "tokenizer='wordpeice': choose one of sentencepiece"),
    (['--corpus=.', '--name=a/b'], "name='a/b': letters"),
    (['--corpus=good.jsonl', '--text_field=body'], 'no row of good.jsonl has it; its fields are id'),
    (['--corpus=empty.jsonl'], 'empty.jsonl: no document in it'),
    (['--corpus=good.jsonl', '--vocab_size=90000'], 'vocab_size=90000: sentencepiece cannot train it'),
    (['--corpus=good.jsonl', '--tokenizer=tiktoken:nosuch'], "'tiktoken:nosuch': no such file; choose"),
    (['--corpus=owner/name'], 'owner/name: the Hugging Face hub did not give it'),
    (['--corpus=oscar'], "corpus='oscar' needs --path="),
    (['--corpus=good.jsonl', '--data_dir=good.jsonl'], 'good.jsonl'),
    (['--corpus=one.jsonl', '--vocab_size=30'], 'none of them left for training'),
    (['--corpus=.', '--segmenter=jeiba'], "segmenter='jeiba': choose one of '', jieba, sentencepiece, sent"),
    (['--corpus=.', '--segmenter=jieba:my.dict'], "segmenter='jieba:my.dict': choose one of"),
    (['--corpus=.', '--segmenter=:x'], "segmenter=':x': choose one of"),
    (['--corpus=.', '--segmenter=sentencepiece:'], "segmenter='sentencepiece:': choose one of"),
    (['--corpus=.', '--segmenter=jieba'], "segmenter='jieba' needs tokens of one Chinese character, which "
     "tokenizer='sentencepiece' does not make: choose wordpiece or character"),
    (['--corpus=.', '--segmenter=jieba', '--tokenizer=tiktoken:gpt2'], "tokenizer='tiktoken:gpt2' does not"),
    (['--corpus=.', '--segmenter_vocab=1'], 'segmenter_vocab=1: must lie between 16 and'),
    (['--corpus=good.jsonl', '--tokenizer=character:no.txt'], 'no.txt: no such file'),
    (['--corpus=good.jsonl', '--tokenizer=character:good.jsonl'], 'not a BERT vocabulary: [CLS] is missing'),
    (['--corpus=good.jsonl', '--tokenizer=character', '--segmenter=sentencepiece'],
     'segmenter_vocab=16000: sentencepiece cannot train it: this corpus allows at most'),
    (['--corpus=good.jsonl', '--tokenizer=character', '--segmenter=sentencepiece:no.model'],
     'no.model: No such'),
    (['--corpus=good.jsonl', '--tokenizer=character', '--segmenter=sentencepiece:good.jsonl'],
     'segmenter.model: not a sentencepiece model'),
])
def test_malformed_command_lines(tmp_path, arguments, said):
    write_jsonl(tmp_path / 'good.jsonl', make_texts(30))
    write_jsonl(tmp_path / 'one.jsonl', [' '.join(WORDS)])
    (tmp_path / 'empty.jsonl').write_bytes(b'{"text": ""}\n')
    if any(item.startswith('--tokenizer=character') for item in arguments):
        pytest.importorskip('tokenizers')
    process = command(tmp_path, '--num_proc=1', *arguments)
    output, errors = process.communicate()
    lines = [line for line in errors.splitlines() if not line.startswith('preparing ')]
    assert process.returncode == 2 and len(lines) == 1 and said in lines[0] and not output


def test_prepared_folder_is_kept_or_refused(tmp_path, capfd):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(100))
    before = contents(prepare(tmp_path, corpus=source)[0])
    assert contents(prepare(tmp_path, corpus=source, num_proc=2)[0]) == before
    assert 'already prepared' in capfd.readouterr().err
    with pytest.raises(UserError, match='prepared with vocab_size=60, now vocab_size=50'):
        prepare(tmp_path, corpus=source, vocab_size=50)


def test_folder_of_before_the_segmenter_is_kept(tmp_path, capfd):
    pytest.importorskip('tokenizers')
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', make_chinese(100)), 'tokenizer': 'character'}
    folder, meta = prepare(tmp_path, **usual)
    for knob in ('segmenter', 'segmenter_vocab'):
        del meta['settings'][knob]
    pathlib.Path(folder, 'meta.json').write_text(json.dumps(meta))
    before = contents(folder)
    assert contents(prepare(tmp_path, **usual)[0]) == before and 'already prepared' in capfd.readouterr().err
    assert all(DEFAULTS[knob] == value for knob, value in prepare_data.SINCE.items())
    with pytest.raises(UserError, match="prepared with segmenter='', now segmenter='sentencepiece': give"):
        prepare(tmp_path, **usual, segmenter='sentencepiece')


def test_load_meta_misses_the_words(tmp_path):
    pytest.importorskip('tokenizers')
    folder, meta = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_chinese(100)),
                           tokenizer='character', segmenter='sentencepiece', segmenter_vocab=90)
    words, shard = pathlib.Path(folder, 'val_00000.words'), meta['splits']['val']['shards'][0]
    assert shard['words'] == words.name and meta['files'][words.name]['bytes'] == shard['n_tokens']
    data = words.read_bytes()
    words.write_bytes(data[1:])
    with pytest.raises(UserError, match=f'val_00000.words: {len(data) - 1} bytes, should have {len(data)}'):
        prepare_data.load_meta(folder)
    words.write_bytes(data)
    for change, said in (({'words': '../x'}, "names '../x', which is not a file"), ({}, 'meta.json: broken')):
        del shard['words']
        shard |= change
        pathlib.Path(folder, 'meta.json').write_text(json.dumps(meta))
        with pytest.raises(UserError, match=said):
            prepare_data.load_meta(folder)


def test_load_meta_names_what_is_wrong(tmp_path):
    folder, meta = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(100)))
    file_name = os.path.join(folder, 'meta.json')
    cases = [(dict(meta, format=2), 'format 2'), (dict(meta, files={}), 'not a file of this folder'),
             ([], 'broken'),
             (dict(meta, files={**meta['files'], '../x': {'bytes': 1}}), "'../x', which is not a file"),
             (dict(meta, files={**meta['files'], 'gone': {'bytes': 1}}), 'gone: missing')]
    for content, said in cases:
        with open(file_name, 'w') as file:
            json.dump(content, file)
        with pytest.raises(UserError, match=said):
            prepare_data.load_meta(folder)
    with open(file_name, 'w') as file:
        file.write(json.dumps(meta)[:-20])
    with pytest.raises(UserError, match='broken'):
        prepare_data.load_meta(folder)
    with open(file_name, 'w') as file:
        json.dump(meta, file)
    with open(os.path.join(folder, 'train_00000.bin'), 'ab') as file:
        file.write(b'xx')
    with pytest.raises(UserError, match='train_00000.bin: .* bytes, should have'):
        prepare_data.load_meta(folder)
    with pytest.raises(UserError, match='not prepared .* prepare_data.py --name=none'):
        prepare_data.load_meta(str(tmp_path / 'none'))


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    for name, value in (('BATCH_BYTES', 50_000), ('FLUSH_BYTES', 200_000), ('WRITE_BYTES', 50_000)):
        monkeypatch.setattr(prepare_data, name, value)
    small, _ = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(300)))
    model = os.path.join(small, 'sentencepiece.model')
    peaks = []
    for size in (20_000, 60_000):
        source = write_jsonl(tmp_path / f'{size}.jsonl', make_texts(size))
        tracemalloc.start()
        prepare(tmp_path, corpus=source, tokenizer=f'sentencepiece:{model}', name=str(size),
                shard_bytes=300_000)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        os.remove(source)
    assert peaks[1] < 1.5 * peaks[0]


def unpack_novels(name, count, folder):
    """The first texts of an archive of real text; without it the test is skipped."""
    data = os.environ.get('THINBERT_DATA') or os.path.join(ROOT, '..', 'shared', 'data')
    archive = os.path.join(data, name)
    if not os.path.isfile(archive):
        pytest.skip('the novels are not here; set THINBERT_DATA to their folder')
    with tarfile.open(archive) as file:
        novels = (member for member in file if member.isfile() and member.name.endswith('.txt'))
        for member in itertools.islice(novels, count):
            (folder / os.path.basename(member.name)).write_bytes(file.extractfile(member).read())


def test_real_novels(tmp_path):
    unpack_novels('en_100_novels.tar.xz', 20, tmp_path)
    folder, meta = prepare(tmp_path, corpus=str(tmp_path / '*.txt'), vocab_size=2000,
                           tokenizer_sample=1_000_000, max_bytes=100_000)
    tokenizer = prepare_data.load_tokenizer(folder, meta)
    train = read_split(folder, meta, 'train')
    assert meta['splits']['train']['tokens'] > 10**6 and 5 < meta['unigram_entropy'] < np.log(2000)
    assert ' the ' in tokenizer.decode(train[0])


def test_real_chinese_novels(tmp_path):
    pytest.importorskip('tokenizers')
    unpack_novels('zh_classics.tar.xz', 1, tmp_path)
    folder, meta = prepare(tmp_path, corpus=str(tmp_path / '*.txt'), tokenizer='character', vocab_size=3000,
                           segmenter='sentencepiece', segmenter_vocab=6000, tokenizer_sample=300_000,
                           max_bytes=50_000, val_fraction=0.1)
    tokenizer, ids, words = prepare_data.load_tokenizer(folder, meta), [], []
    for shard in meta['splits']['train']['shards']:
        ids += np.fromfile(os.path.join(folder, shard['tokens']), '<u2').tolist()
        words += np.fromfile(os.path.join(folder, shard['words']), np.uint8).tolist()
    assert len(ids) == len(words) > 400_000 and ids.count(meta['special']['unk']) < 0.02 * len(ids)
    text = ''.join('|' * word + tokenizer.piece(item) for item, word in zip(ids, words, strict=True))
    common = collections.Counter(word for word in text.split('|') if len(word) == 2).most_common(20)
    assert {'行者', '师父', '八戒', '一个', '我们'} < set(dict(common))
