"""prepare_data.py: byte-equal results, every bad row counted, nothing lost, nothing held out that trains."""
import base64
import collections
import gzip
import hashlib
import io
import itertools
import json
import os
import pathlib
import random
import re
import sys
import tarfile
import tracemalloc
import types
import unicodedata
import zipfile

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import prepare_data  # noqa: E402
from configurator import UserError, configure  # noqa: E402

pytest.importorskip('sentencepiece')
WORDS = ['red', 'green', 'blue', 'small', 'large', 'quick', 'slow', 'river', 'mountain', 'house', 'walks',
         'sings', 'reads', 'under', 'over', 'the', 'of', 'and', '[MASK]']
VOCAB = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '[', ']', 'mask', 'the', 'of', 'and', 'red', 'ri',
         '##ver', 'walks']
DEFAULTS = configure(dict(vars(prepare_data)), [])[0]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    monkeypatch.setattr(os, 'fsync', lambda file: None)


def knobs(folder, **changes):
    usual = {'data_dir': str(folder / 'data'), 'name': 'x', 'vocab_size': 60, 'num_proc': 1,
             'val_fraction': 0.1}
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
    for shard in meta['splits'][split]:
        stem = os.path.join(folder, shard['stem'])
        ids = np.fromfile(f'{stem}.bin', np.dtype(meta['dtype']).newbyteorder('<'))
        starts = np.fromfile(f'{stem}.idx', '<i8')
        assert starts[0] == 0 and starts[-1] == len(ids) == shard['tokens']
        assert len(starts) - 1 == shard['documents'] > 0
        assert np.array_equal(starts[1:] - 1, np.flatnonzero(ids == meta['special']['sep']))
        documents += [tuple(ids[a:b - 1].tolist()) for a, b in itertools.pairwise(starts)]
    return documents


def read_all(folder, meta):
    return read_split(folder, meta, 'train') + read_split(folder, meta, 'val')


def contents(folder):
    """{path within a folder: bytes} of all files."""
    files = (item for item in sorted(pathlib.Path(folder).rglob('*')) if item.is_file())
    return {str(item.relative_to(folder)): item.read_bytes() for item in files}


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


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_every_document_once_in_order_and_literal_mask_is_text(tmp_path, kind):
    pytest.importorskip(NEEDS[kind])
    texts = make_texts(300) + ['the red [MASK] walks']
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=SPECS[kind](tmp_path), unit_bytes=10_000)
    tokenizer = prepare_data.load_tokenizer(folder)
    held = [prepare_data.text_hash(text, prepare_data.HASH_SEED) < 0.1 * 2**64 for text in texts]
    direct = list(map(tuple, tokenizer.encode(texts)))
    assert len(meta['splits']['train']) > 3
    for split, wanted in (('train', False), ('val', True)):
        assert read_split(folder, meta, split) == [
            ids for ids, val in zip(direct, held, strict=True) if val == wanted]
    assert list(map(tuple, tokenizer.encode_arrays(texts[:5]))) == direct[:5]
    ids = tokenizer.encode(['the red [MASK] walks'])[0]
    assert not set(ids) & set(tokenizer.special.values())
    assert 'mask' in tokenizer.decode(ids).lower()
    assert tokenizer.pieces[tokenizer.special['mask']] == '[MASK]'
    assert tokenizer.vocab_size == meta['vocab_size'] == len(tokenizer.pieces)
    assert tokenizer.vocab_size > max(tokenizer.special.values())
    assert set(tokenizer.special) - {'unk'} == {'pad', 'cls', 'sep', 'mask'}
    assert ('unk' in tokenizer.special) == (kind != 'tiktoken')


def test_meta_counts_entropy_and_digests(tmp_path):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(500))
    folder, meta = prepare(tmp_path, corpus=source, unit_bytes=20_000)
    train = np.concatenate([np.array(ids) for ids in read_split(folder, meta, 'train')])
    share = np.unique(train, return_counts=True)[1] / len(train)
    assert len(meta['splits']['train']) > 2                             # over all units
    assert meta['unigram_entropy'] == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)
    files = contents(folder)
    for number in range(len(meta['splits']['train'])):
        record = json.loads(files[f'unit_{number:05}.json'])
        for split in ('train', 'val'):
            for ending, digest in record[split]['sha256'].items():
                assert hashlib.sha256(files[f'{split}_{number:05}.{ending}']).hexdigest() == digest
    assert meta['special'] == {'pad': 0, 'unk': 1, 'cls': 2, 'sep': 3, 'mask': 4}
    assert all(re.fullmatch('[0-9a-f]{16}', meta['identity'][key]) for key in ('tokenizer', 'train', 'val'))
    assert meta['tokenizer']['kind'] == 'sentencepiece' and meta['settings']['unit_bytes'] == 20_000


def test_identity_is_of_what_makes_the_ids(tmp_path):
    """The tokenizer's does not tell where its file comes from, a split's is of its tokens alone."""
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(100))
    folder, meta = prepare(tmp_path, corpus=source)
    given = f'sentencepiece:{folder}/tokenizer/sentencepiece.model'
    assert prepare(tmp_path, corpus=source, tokenizer=given, name='same')[1]['identity'] == meta['identity']
    other = prepare(tmp_path, corpus=source, tokenizer=given, val_fraction=0.3, name='other')[1]['identity']
    assert [other[key] == value for key, value in meta['identity'].items()] == [True, False, False]


@pytest.mark.parametrize('kind', prepare_data.TOKENIZERS)
def test_a_validation_corpus_with_the_tokenizer_of_another(tmp_path, kind):
    """val_fraction=1 and tokenizer=FOLDER: the same ids as the other's tokenizer gives, all held out."""
    pytest.importorskip(NEEDS[kind])
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(200))
    first, meta = prepare(tmp_path, corpus=source, tokenizer=SPECS[kind](tmp_path), lower_case=False)
    texts = make_texts(50, seed=1)
    folder, other = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'b.jsonl', texts), tokenizer=first,
                            val_fraction=1.0, name='ptb', unit_bytes=3000)
    assert other['identity']['tokenizer'] == meta['identity']['tokenizer']
    assert other['tokenizer'] == meta['tokenizer'] and other['special'] == meta['special']
    direct = list(map(tuple, prepare_data.load_tokenizer(first).encode(texts)))
    assert read_split(folder, other, 'val') == direct and other['splits']['train'] == []
    share = np.unique(np.concatenate(direct), return_counts=True)[1] / sum(map(len, direct))
    assert other['unigram_entropy'] == pytest.approx(-(share * np.log(share)).sum(), rel=1e-12)
    prepare_data.check_sizes(folder, other)
    prepare_data.check_folder(folder)


def test_validation_is_never_in_train(tmp_path):
    """Equal texts are on one side, in whatever units; without one held out the smallest fraction is named."""
    texts = make_texts(200) * 3
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', texts), 'unit_bytes': 20_000}
    folder, meta = prepare(tmp_path, **usual, val_fraction=0.2)
    train, val = read_split(folder, meta, 'train'), read_split(folder, meta, 'val')
    assert not set(train) & set(val) and len(train) + len(val) == 600
    assert 60 < len(val) < 180 and all(count == 3 for count in collections.Counter(val).values())
    with pytest.raises(UserError, match='holds out none of its 600 documents with tokens; the s') as error:
        prepare(tmp_path, **usual, val_fraction=1e-9, name='one')
    assert not (tmp_path / 'data' / 'one').exists()
    smallest = float(str(error.value).split()[-1])
    assert len(read_split(*prepare(tmp_path, **usual, val_fraction=smallest, name='one'), 'val')) == 3
    with pytest.raises(UserError, match='holds out none of its 600 documents'):
        prepare(tmp_path, **usual, val_fraction=0.99 * smallest, name='none')


def test_units_cover_the_corpus(tmp_path, monkeypatch):
    """Ranges of one file, small files together, never more than MOST_UNITS."""
    texts = make_texts(300) + ['red ' * 2000]
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', texts), 'tokenizer': tiktoken_file(tmp_path)}
    whole = read_all(*prepare(tmp_path, **usual, name='whole'))
    for most, name in ((1000, 'many'), (7, 'few')):
        monkeypatch.setattr(prepare_data, 'MOST_UNITS', most)
        folder, meta = prepare(tmp_path, **usual, unit_bytes=1000, name=name)
        units = json.loads(contents(folder)['units.json'])['units']
        assert len(units) in ((range(50, 100), range(7, 9))[name == 'few'])
        assert sorted(read_all(folder, meta)) == sorted(whole)
    (tmp_path / 'small').mkdir()
    for i in range(40):
        write_jsonl(tmp_path / 'small' / f'{i}.jsonl', texts[i:i + 1])
    usual['corpus'] = str(tmp_path / 'small')
    folder, _ = prepare(tmp_path, **usual, unit_bytes=2000, name='small')
    units = json.loads(contents(folder)['units.json'])['units']
    assert 3 < len(units) < 10 and sum(len(unit['pieces']) for unit in units) == 40


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
    starts = np.fromfile(os.path.join(folder, 'tokenizer', 'word_start.bin'), np.uint8)
    tokenizer = prepare_data.load_tokenizer(folder)
    pieces = tokenizer.pieces
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
    assert contents(folder)['tokenizer/vocab.txt'].decode() == '\n'.join([*pieces, ''])
    tokenizer = prepare_data.load_tokenizer(folder)
    found = [tokenizer.pieces[item] for item in tokenizer.encode(['Bé好baz'])[0]]
    assert found == ['b', '##e', '好', '[UNK]']
    usual = {'corpus': source, 'tokenizer': 'character', 'val_fraction': 0.4}
    cut, _ = prepare(tmp_path, **usual, vocab_size=17, name='cut')     # no piece without its '##' piece
    assert contents(cut)['tokenizer/vocab.txt'].decode() == '\n'.join([*pieces[:16], ''])
    cased, _ = prepare(tmp_path, **usual, lower_case=False, name='cased')
    found = contents(cased)['tokenizer/vocab.txt'].decode().split('\n')
    assert {'A', '##A', 'B', 'a', 'é', 'Ｚ'} < set(found)


def test_characters_of_a_given_vocabulary(tmp_path):
    pytest.importorskip('tokenizers')
    pieces = ['[PAD]', '\u2028', '[UNK]', '[CLS]', '[SEP]', '[MASK]', '我', '好', 'model', '##s', '\x85']
    (tmp_path / 'vocab.txt').write_bytes('\r\n'.join(pieces).encode() + b'\r\n')
    source = write_jsonl(tmp_path / 'a.jsonl', [f'我models好{i}' for i in range(20)])
    folder, meta = prepare(tmp_path, corpus=source, tokenizer=f'character:{tmp_path}/vocab.txt')
    assert meta['vocab_size'] == 11 and meta['special'] == {'pad': 0, 'unk': 2, 'cls': 3, 'sep': 4, 'mask': 5}
    assert set(read_split(folder, meta, 'train')) == {(6, 8, 9, 7, 2)}
    assert contents(folder)['tokenizer/vocab.txt'] == (tmp_path / 'vocab.txt').read_bytes()


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
    folder, meta = prepare(tmp_path, corpus=source, tokenizer='character', val_fraction=0.45)
    tokenizer = prepare_data.load_tokenizer(folder)
    (ids, offsets), = tokenizer.encode_offsets([text])
    words = prepare_data.mark_words(text, ids, offsets, starts, np.array(tokenizer.word_starts()))
    marked = ' '.join('|' * bool(word) + tokenizer.pieces[i] for i, word in zip(ids, words, strict=True))
    assert marked == tokens and ids == tokenizer.encode([text])[0]


def test_starts_of_sentencepiece_are_in_the_text_as_given(tmp_path):
    config, texts = knobs(tmp_path, segmenter_vocab=90), make_chinese(200)
    prepare_data.SentencePieceSegmenter.save(tmp_path, '', config, lambda: texts)
    segmenter = prepare_data.SentencePieceSegmenter(tmp_path, {})
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
    monkeypatch.setattr(prepare_data, 'BATCH', 2000)
    texts = make_chinese(200) + make_chinese(3)                 # some twice
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    usual = {'corpus': source, 'tokenizer': 'character', 'vocab_size': 100, 'val_fraction': 0.2}
    folder, meta = prepare(tmp_path, **usual, segmenter=kind, segmenter_vocab=90, unit_bytes=5000)
    tokenizer = prepare_data.load_tokenizer(folder)
    segmenter = prepare_data.load_tool(folder, 'segmenter')
    expected = collections.Counter()
    for text, (ids, offsets) in zip(texts, tokenizer.encode_offsets(texts), strict=True):
        tokens = [(tokenizer.pieces[item], *where) for item, where in zip(ids, offsets.tolist(), strict=True)]
        expected[tuple(ids), tuple(words_by_hand(text, tokens, segmenter.starts(text)))] += 1
    found = collections.Counter()
    for split, shards in meta['splits'].items():
        words = [np.fromfile(os.path.join(folder, f"{shard['stem']}.words"), np.uint8) for shard in shards]
        assert [len(item) for item in words] == [shard['tokens'] for shard in shards]
        assert len(words) > 2
        words, start = np.concatenate(words), 0
        for ids in read_split(folder, meta, split):
            found[ids, tuple(words[start:start + len(ids)].astype(bool).tolist())] += 1
            assert words[start + len(ids)] == 1                 # [SEP]
            start += len(ids) + 1
        assert start == len(words) and set(words) == {0, 1}
    assert found == expected
    plain, without = prepare(tmp_path, **usual, unit_bytes=5000, name='plain')
    same = {name: data for name, data in contents(folder).items() if name.endswith(('.bin', '.idx', '.txt'))}
    assert same == {name: data for name, data in contents(plain).items() if not name.endswith('.json')}
    assert 'segmenter' not in without and set(meta) - set(without) == {'segmenter'}


def test_a_given_segmenter(tmp_path):
    pytest.importorskip('tokenizers')
    usual = {'corpus': write_jsonl(tmp_path / 'a.jsonl', make_chinese(200)), 'tokenizer': 'character'}
    made, _ = prepare(tmp_path, **usual, segmenter='sentencepiece', segmenter_vocab=90)
    given = f'sentencepiece:{made}/tokenizer/segmenter.model'
    again, meta = prepare(tmp_path / 'given', **usual, segmenter=given)
    assert contents(again)['train_00000.words'] == contents(made)['train_00000.words']
    assert meta['segmenter'].items() >= {'kind': 'sentencepiece', 'trained': False}.items()


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
    b'{"text": "a\\ud800b"}': 'invalid UTF-8', b'{"text": "a\\u0000b"}': 'NUL',
    b'{"text": "\xff"}': 'invalid UTF-8',
    b'{"text": "' + b'a' * 10**7 + b'"}': 'too long', b'{"text": "cut': 'broken JSON',
    b'[1, 2]': 'not an object',
    b'{"title": "x"}': 'missing field', b'[' * 100_000: 'broken JSON'}


@pytest.mark.parametrize('unit_bytes', [10**8, 200_000])
def test_bad_rows_are_counted_and_named(tmp_path, capfd, unit_bytes):
    """The file begins with a byte order mark; pieces of it name the lines of the whole."""
    good = [json.dumps({'text': text}).encode() for text in make_texts(100)]
    (tmp_path / 'a.jsonl').write_bytes(b'\xef\xbb\xbf' + b'\n'.join([*good[:50], *BAD, b'', *good[50:]]))
    folder, meta = prepare(tmp_path, corpus=str(tmp_path / 'a.jsonl'), unit_bytes=unit_bytes)
    assert meta['skipped'] == collections.Counter(BAD.values())
    tokenizer = prepare_data.load_tokenizer(folder)
    assert sorted(read_all(folder, meta)) == sorted(map(tuple, tokenizer.encode(make_texts(100))))
    said = capfd.readouterr().err
    for line, kind in enumerate(list(BAD.values())[:5], 51):
        assert f'a.jsonl:{line}: {kind}\n' in said
    assert said.count('skipped ') == 6


def test_a_row_too_long_is_never_in_memory(tmp_path):
    texts = make_texts(40)
    texts[20:20] = ['x' * 30_000_000]
    source = write_jsonl(tmp_path / 'a.jsonl', texts)
    tracemalloc.start()
    with open(source, 'rb') as file:
        rows = list(prepare_data.read_lines(file, 0, None, 1_000_000))
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()
    assert [bad for _, _, bad in rows] == [''] * 20 + ['too long'] + [''] * 20


@pytest.mark.parametrize('n', [2, 3, 17, 400])
def test_pieces_of_a_file_have_each_line_once(tmp_path, n):
    """Edges within lines, between them, within one that is too long, and more pieces than lines."""
    lines = ['é' * (7 * i % 40) + str(i) for i in range(60)] + ['x' * 3000, '', 'last']
    (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
    edges = prepare_data.cut_file(str(tmp_path / 'a.jsonl'), n)
    assert len(edges) == n + 1
    data = (tmp_path / 'a.jsonl').read_bytes()
    whole = [(line, bad) for _, line, bad in prepare_data.read_lines(io.BytesIO(data), 0, None, 1000)]
    found = [(line, bad) for begin, end in itertools.pairwise(edges)
             for _, line, bad in prepare_data.read_lines(io.BytesIO(data), begin, end, 1000)]
    assert found == whole and len(whole) == 63 and [bad for _, bad in whole].count('too long') == 1


def test_bad_rows_of_the_other_formats(tmp_path):
    arrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    texts, corpus = make_texts(60), tmp_path / 'corpus'
    corpus.mkdir()
    column = arrow.array([text.encode() for text in texts] + [b'\xff', None, b''], arrow.binary())
    column = arrow.StringArray.from_buffers(len(column), *column.buffers()[1:], column.buffers()[0])
    parquet.write_table(arrow.table({'text': column, 'n': range(len(column))}), corpus / 'a.parquet')
    (corpus / 'b.txt').write_bytes('\ufeffred house\n'.encode() + b'\xff\nmore\n\0\n')
    (corpus / 'e').write_text('a file without an ending is text')
    _, meta = prepare(tmp_path, corpus=str(corpus))
    assert meta['skipped'] == {'NUL': 1, 'empty': 1, 'invalid UTF-8': 2, 'null': 1}


@pytest.mark.parametrize('name', ['c.jsonl.gz', 'c.jsonl.zst', 'c.parquet', 'c.zip'])
def test_a_broken_file_stops_and_is_read_again(tmp_path, name):
    """Units that were done stay; the file may have another size when it is mended."""
    (tmp_path / 'corpus').mkdir()
    write_jsonl(tmp_path / 'corpus' / 'a.jsonl', make_texts(60))
    file = tmp_path / 'corpus' / name
    whole = compressed(name, make_texts(200, seed=1))
    file.write_bytes(whole)
    usual = {'corpus': str(tmp_path / 'corpus'), 'unit_bytes': 5000}
    reference = contents(prepare(tmp_path / 'ref', **usual)[0])
    file.write_bytes(whole[:-9])
    model = f'sentencepiece:{tmp_path}/ref/data/x/tokenizer/sentencepiece.model'
    for _ in range(2):
        with pytest.raises(UserError, match=f'{name}: cannot be read: '):
            prepare(tmp_path, **usual, tokenizer=model)
    file.write_bytes(whole)
    same = contents(prepare(tmp_path, **usual, tokenizer=model)[0])
    assert {item for item in same if item.endswith(('.bin', '.idx'))} > {'train_00001.bin'}
    assert all(same[item] == reference[item] for item in same if item.endswith(('.bin', '.idx')))
    assert not [item for item in same if item.endswith('.tmp')]


def compressed(name, texts):
    """Bytes of a file of these texts, in the format that the name says."""
    lines = b''.join(json.dumps({'text': text}).encode() + b'\n' for text in texts)
    if name.endswith('.gz'):
        return gzip.compress(lines)
    if name.endswith('.zst'):
        return pytest.importorskip('zstandard').ZstdCompressor().compress(lines)
    stream = io.BytesIO()
    if name.endswith('.zip'):
        with zipfile.ZipFile(stream, 'w') as archive:
            for i, text in enumerate(texts):
                archive.writestr(f'{i}.txt', text)
        return stream.getvalue()
    arrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    parquet.write_table(arrow.table({'text': texts}), stream, row_group_size=50)
    return stream.getvalue()


def test_readers_agree(tmp_path, capfd):
    texts = make_texts(40)
    for name in ('jsonl', 'gz', 'txt', 'json', 'json.gz'):
        (tmp_path / name / 'deep').mkdir(parents=True)
    write_jsonl(tmp_path / 'jsonl' / 'a.jsonl', texts)
    write_jsonl(tmp_path / 'json' / 'a.json', texts)
    for name in ('notes.md', 'more.md', 'picture.png'):
        (tmp_path / 'json' / name).write_text('of no use')
    write_jsonl(tmp_path / 'gz' / 'deep' / 'a.jsonl.gz', texts, opener=gzip.open)
    write_jsonl(tmp_path / 'json.gz' / 'c4-train.00000-of-01024.json.gz', texts, opener=gzip.open)
    for i, text in enumerate(texts):
        (tmp_path / 'txt' / 'deep' / f'{i}.txt').write_text(text)
    sources = {'plain': 'jsonl/a.jsonl', 'gz': 'gz', 'txt': 'txt', 'glob': '*sonl/*.jsonl', 'json': 'json',
               'c4': 'json.gz', 'deep': 'gz/**/*.gz'}
    made = {name: prepare(tmp_path, corpus=str(tmp_path / source), name=name)
            for name, source in sources.items()}
    documents = {name: sorted(read_all(*pair)) for name, pair in made.items()}
    assert all(found == documents['plain'] for found in documents.values()) and len(documents['plain']) == 40
    said = [line for line in capfd.readouterr().err.splitlines() if 'not read' in line]
    assert len(said) == 1
    assert said[0].endswith('json: 3 files of an unknown format are not read: .md 2, .png 1')


def test_zst_and_parquet(tmp_path):
    zstandard, arrow = pytest.importorskip('zstandard'), pytest.importorskip('pyarrow')
    parquet = pytest.importorskip('pyarrow.parquet')
    texts = make_texts(40)
    data = pathlib.Path(write_jsonl(tmp_path / 'a.jsonl', texts, 'body')).read_bytes()
    half = data.index(b'\n', len(data) // 2) + 1
    frames = [zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])]
    (tmp_path / 'a.jsonl.zst').write_bytes(b''.join(frames))
    table = arrow.table({'n': range(40), 'body': texts})
    parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=9, compression='none')
    made = [prepare(tmp_path, corpus=str(tmp_path / item), name=item, text_field='body', unit_bytes=2000,
                    tokenizer=tiktoken_file(tmp_path))
            for item in ('a.jsonl', 'a.jsonl.zst', 'a.parquet')]
    documents = [read_split(*pair, 'train') for pair in made]
    assert documents[0] == documents[1] == documents[2]
    assert len(json.loads(contents(made[2][0])['units.json'])['units']) > 2         # row groups
    with pytest.raises(UserError, match="missing field \\(text_field 'text' is not among n, body"):
        prepare(tmp_path, corpus=str(tmp_path / 'a.parquet'), name='none')


def test_long_text_file_is_cut_at_blank_lines(tmp_path):
    parts = [f'part {i} ' + 'red house ' * 30 for i in range(20)]
    (tmp_path / 'a.txt').write_text('\n\n'.join(parts))
    with open(tmp_path / 'a.txt', 'rb') as file:
        rows = list(prepare_data.read_txt(file, 0, None, {'joined': None}, 1000))
    assert [bad for _, _, bad in rows] == [''] * len(rows) and len(rows) == 7
    assert ''.join(text for _, text, _ in rows) == '\n\n'.join(parts)
    assert all(text.startswith('part') for _, text, _ in rows)
    assert rows[1][0] == (0, 1 + 2 * rows[0][1].count('part'))


def make_clue(folder):
    """Two archives in CLUECorpusSmall's form; returns the documents: lines, blank lines between documents."""
    texts = [text.replace(' ', '\n') for text in make_texts(200)]
    folder.mkdir()
    for archive, half in (('news2016zh_corpus.zip', texts[:120]), ('wiki2019zh_corpus.zip', texts[120:])):
        with zipfile.ZipFile(folder / archive, 'w', zipfile.ZIP_DEFLATED) as file:
            for i in range(0, len(half), 10):
                file.writestr(f'part/{i:03}.txt', '\n \n\n'.join(half[i:i + 10]) + '\n' * (i % 20))
            file.writestr('__MACOSX/part/._000.txt', b'\0\xff')
            file.writestr('part/notes.md', 'of no use')
    return texts


def test_clue_corpus_small_from_its_archives(tmp_path):
    """Each document once, in order, whether an archive is one unit or cut; a bad line names file and line."""
    pytest.importorskip('tokenizers')
    texts = make_clue(tmp_path / 'clue')
    with zipfile.ZipFile(tmp_path / 'clue' / 'wiki2019zh_corpus.zip', 'a') as file:
        file.writestr('part/bad.txt', b'\n\xff\n')
    usual = {'corpus': 'cluecorpussmall', 'path': str(tmp_path / 'clue'), 'tokenizer': 'character'}
    for name, unit_bytes in (('whole', 10**6), ('cut', 1000)):
        folder, meta = prepare(tmp_path, **usual, name=name, unit_bytes=unit_bytes, val_fraction=0.2)
        units = json.loads(contents(folder)['units.json'])['units']
        assert len(units) == 1 if name == 'whole' else len(units) > 5
        direct = list(map(tuple, prepare_data.load_tokenizer(folder).encode(texts)))
        assert sorted(read_all(folder, meta)) == sorted(direct) and meta['skipped'] == {'invalid UTF-8': 1}
        record = json.loads(contents(folder)[f'unit_{len(units) - 1:05}.json'])
        where = [f'{tmp_path}/clue/wiki2019zh_corpus.zip', 0, 'part/bad.txt:2']
        assert record['examples'] == [[where, '', 'invalid UTF-8']]


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
    assert len(read_all(folder, meta)) == 30


def test_docstrings_of_a_package(tmp_path, monkeypatch, capfd):
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
    folder, meta = prepare(tmp_path, path='tinypackage', val_fraction=0.7, vocab_size=30, text_field='body')
    lines = [json.loads(line) for line in contents(folder)['docstrings.jsonl'].splitlines()]
    assert [(line['package'], line['where'], line['text']) for line in lines] == [
        ('tinypackage', 'tinypackage/__init__.py:1', text.format(1)),
        ('tinypackage', 'tinypackage/__init__.py:3', text.format(2) + '\n\nmore'),
        ('tinypackage', 'tinypackage/b.py:5', text.format(4) + text.format(5)),
        ('tinypackage', 'tinypackage/b.py:4', text.format(3))]
    assert len(read_all(folder, meta)) == 4 and meta['skipped'] == {'does not parse': 1}
    assert 'skipped tinypackage/c.py:1: does not parse\n' in capfd.readouterr().err
    assert meta['source'] == [{'packages': {'tinypackage': ''}, 'files': 3, 'skipped': {'does not parse': 1}}]
    assert 'tinypackage' not in sys.modules
    with pytest.raises(UserError, match='pip install nosuchpackage'):
        prepare(tmp_path, path='nosuchpackage', name='y')


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose datasets are local files, three of them; what was asked of it is in `asked`."""
    datasets, library = pytest.importorskip('datasets'), pytest.importorskip('huggingface_hub')
    sources = [write_jsonl(tmp_path / f'{k}.jsonl', [*make_texts(30, k), None, ' = A = ']) for k in range(3)]
    local, found = datasets.load_dataset, types.SimpleNamespace(asked=[], sources=sources)

    def load_dataset(name, subset, split, streaming, revision):
        found.asked.append((name, subset, split, revision))
        kind = os.path.splitext(found.sources[0])[1][1:].replace('jsonl', 'json')
        return local(kind, data_files=found.sources, split=split, streaming=streaming,
                     cache_dir=str(tmp_path / 'cache'))

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    facts = types.SimpleNamespace(sha='abc123')
    monkeypatch.setattr(library.HfApi, 'dataset_info', lambda self, name, revision: facts)
    yield found
    prepare_data.open_hub.cache_clear()


def test_hub_rows_revision_and_errors(tmp_path, monkeypatch, hub):
    folder, meta = prepare(tmp_path, corpus='wikipedia')
    assert hub.asked == [('wikimedia/wikipedia', '20231101.en', 'train', 'abc123')]
    assert meta['source'][0]['revision'] == 'abc123' and meta['skipped'] == {'null': 3}
    assert len(json.loads(contents(folder)['units.json'])['units']) == 3
    folder, meta = prepare(tmp_path, corpus='books+wikipedia', name='')
    assert [origin['hub'] for origin in meta['source']] == ['SamuelYang/bookcorpus', 'wikimedia/wikipedia']
    assert hub.asked[1:] == [('SamuelYang/bookcorpus', None, 'train', 'abc123')]    # the other is still open
    assert meta['name'] == 'books_wikipedia' and meta['skipped'] == {'null': 6}
    assert len(read_all(folder, meta)) == 3 * 1 + 3 * 31                # joined rows: a unit a file
    prepare_data.open_hub.cache_clear()
    with pytest.raises(UserError, match='hub: OSError: 404'), prepare_data.named('owner/name'):
        raise OSError('404 for url https://huggingface.co/owner/name/resolve/main/a.txt')
    monkeypatch.setattr('huggingface_hub.HfApi.dataset_info', lambda self, name, revision: 1 / 0)
    with pytest.raises(UserError, match='owner/name: cannot be read from .* hub: ZeroDivisionError'):
        prepare(tmp_path, corpus='owner/name', name='other')

    def unreachable(self, name, revision):
        raise ConnectionError('Name or service not known')
    monkeypatch.setattr('huggingface_hub.HfApi.dataset_info', unreachable)
    with pytest.raises(UserError, match='hub: no internet access. train.py --dataset=doc.*ConnectionError'):
        prepare(tmp_path, corpus='owner/name', name='other')


def test_units_of_the_hub_are_row_groups_where_files_are_few(tmp_path, hub):
    arrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    hub.sources[:] = [str(tmp_path / f'{k}.parquet') for k in range(2)]
    for k, source in enumerate(hub.sources):
        parquet.write_table(arrow.table({'text': make_texts(60, k)}), source, row_group_size=20)
    folder, meta = prepare(tmp_path, corpus='fineweb')
    assert len(json.loads(contents(folder)['units.json'])['units']) == 6
    tokenizer = prepare_data.load_tokenizer(folder)
    assert sorted(read_all(folder, meta)) == sorted(
        map(tuple, tokenizer.encode(make_texts(60, 0) + make_texts(60, 1))))
    rows = [text if i % 6 else f' = {i} = ' for i, text in enumerate(make_texts(60))]
    for source in hub.sources:
        parquet.write_table(arrow.table({'text': rows}), source, row_group_size=20)
    prepare_data.open_hub.cache_clear()
    folder, meta = prepare(tmp_path, corpus='wikitext', name='joined', val_fraction=0.3)
    assert len(json.loads(contents(folder)['units.json'])['units']) == 2 and len(read_all(folder, meta)) == 20


def test_max_documents_are_the_first_of_each_unit(tmp_path):
    texts = make_texts(300)
    source = write_jsonl(tmp_path / 'a.jsonl', [None, *texts])
    folder, meta = prepare(tmp_path, corpus=source, unit_bytes=10_000, max_documents=50)
    units = len(json.loads(contents(folder)['units.json'])['units'])
    tokenizer = prepare_data.load_tokenizer(folder)
    direct, found = list(map(tuple, tokenizer.encode(texts))), read_all(folder, meta)
    assert len(found) == units * -(-50 // units) and set(found) < set(direct) and direct[0] in found
    assert meta['skipped'] == {'null': 1}


def refused(tmp_path, monkeypatch, *arguments):
    """What main() says in one line, called with these arguments in tmp_path."""
    monkeypatch.chdir(tmp_path)
    scope = configure(dict(vars(prepare_data)), [])[0]
    with pytest.raises(UserError) as error:
        config, _ = prepare_data.configure(scope, ['--data_dir=data', '--num_proc=1', *arguments])
        prepare_data.prepare(config)
    assert '\n' not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize('arguments, said', [
    (['--corpus=nowhere.jsonl'], "corpus='nowhere.jsonl': no such file; choose one of docstrings,"),
    (['--corpus=.', '--val_fraction=2'], 'val_fraction=2.0: must be at least 1e-12 and at most 1'),
    (['--corpus=.', '--name=a/b'], "name='a/b': must name a folder directly below data_dir"),
    (['--corpus=.', '--name=..'], "name='..': must name a folder"),
    (['--corpus=.', '--tokenizer=wordpeice'], "tokenizer='wordpeice': choose one of sentencepiece"),
    (['--corpus=good.jsonl', '--tokenizer=data/x'], 'data/x: not prepared (no meta.json): run python prep'),
    (['--corpus=cluecorpussmall'], "corpus='cluecorpussmall' needs --path=<its files, their directory"),
    (['--corpus=broken.zip', '--unit_bytes=1000'], 'broken.zip: cannot be read: BadZipFile'),
    (['--corpus=good.jsonl', '--text_field=body'], "missing field 30; the first: "),
    (['--corpus=empty.jsonl'], 'empty.jsonl: no document in it; skipped: empty 1; the first: '),
    (['--corpus=nothing.jsonl'], 'nothing.jsonl: no document in it'),
    (['--corpus=data.csv'], 'data.csv: no .txt, .json, .jsonl or .parquet file'),
    (['--corpus=good.jsonl', '--vocab_size=90000'], 'vocab_size=90000: sentencepiece cannot train it'),
    (['--corpus=good.jsonl', '--tokenizer=tiktoken:nosuch'], "'tiktoken:nosuch': no such file, and tiktoken"),
    (['--corpus=owner/name'], 'owner/name: cannot be read from the Hugging Face hub'),
    (['--corpus=oscar'], "corpus='oscar' needs --path="),
    (['--corpus=good.jsonl', '--data_dir=good.jsonl'], 'good.jsonl'),
    (['--corpus=one.jsonl', '--vocab_size=30', '--val_fraction=0.999'], 'holds out all of its 1 documents'),
    (['--corpus=one.jsonl', '--vocab_size=30'], 'tokens; the smallest that holds one out is 0.'),
    (['--corpus=.', '--segmenter=jeiba'], "segmenter='jeiba': choose one of jieba, sentencepiece; py"),
    (['--corpus=.', '--segmenter=jieba:my.dict'], "segmenter='jieba:my.dict': choose one of"),
    (['--corpus=.', '--segmenter=:x'], "segmenter=':x': choose one of"),
    (['--corpus=.', '--segmenter=jieba'], "segmenter='jieba' needs tokens of one Chinese character, which "
     "tokenizer='sentencepiece' does not make: choose wordpiece or character"),
    (['--corpus=.', '--segmenter=jieba', '--tokenizer=tiktoken:gpt2'], "tokenizer='tiktoken:gpt2' does not"),
    (['--corpus=.', '--segmenter_vocab=1'], 'segmenter_vocab=1: must be at least 16 and'),
    (['--corpus=good.jsonl', '--tokenizer=character:no.txt'], 'no.txt: no such file'),
    (['--corpus=good.jsonl', '--tokenizer=character:good.jsonl'], 'not a BERT vocabulary: [CLS] is missing'),
    (['--corpus=good.jsonl', '--tokenizer=character', '--segmenter=sentencepiece'],
     'segmenter_vocab=16000: sentencepiece cannot train it: this corpus allows at most'),
    (['--corpus=good.jsonl', '--tokenizer=character', '--segmenter=sentencepiece:no.model'],
     'no.model: No such'),
    (['--corpus=good.jsonl', '--tokenizer=character', '--segmenter=sentencepiece:good.jsonl'],
     'segmenter.model: not a sentencepiece model'),
    (['--corpus=good.jsonl', '--part=4/4'], "part='4/4': must be i/n with i from 0 to n - 1, as in 0/4"),
    (['--corpus=good.jsonl', '--part=x/2'], "part='x/2': must be i/n"),
    (['--corpus=good.jsonl', '--part=1/0'], "part='1/0': must be i/n"),
    (['--corpus=good.jsonl', '--part=-1/2'], "part='-1/2': must be i/n"),
    (['--corpus=good.jsonl', '--part=1'], "part='1': must be i/n"),
    (['--corpus=good.jsonl', '--part=0/999999'], "part='0/999999': must be i/n"),
])
def test_malformed_command_lines(tmp_path, monkeypatch, arguments, said):
    write_jsonl(tmp_path / 'good.jsonl', make_texts(30))
    write_jsonl(tmp_path / 'one.jsonl', [' '.join(WORDS)])
    (tmp_path / 'empty.jsonl').write_bytes(b'{"text": ""}\n')
    (tmp_path / 'nothing.jsonl').write_bytes(b'')
    (tmp_path / 'broken.zip').write_bytes(bytes(3000))
    (tmp_path / 'data.csv').write_bytes(b'a,b\n')
    if any(item.startswith('--tokenizer=character') for item in arguments):
        pytest.importorskip('tokenizers')
    assert said in refused(tmp_path, monkeypatch, *arguments)
    assert not (tmp_path / 'data').exists() or not os.listdir(tmp_path / 'data')


def test_prepared_folder_is_kept_or_refused(tmp_path, capfd):
    source = write_jsonl(tmp_path / 'a.jsonl', make_texts(100))
    before = contents(prepare(tmp_path, corpus=source)[0])
    assert contents(prepare(tmp_path, corpus=source, num_proc=2)[0]) == before
    assert 'already prepared' in capfd.readouterr().err
    with pytest.raises(UserError, match='begun with vocab_size=60, now vocab_size=50: .* or remove '):
        prepare(tmp_path, corpus=source, vocab_size=50)
    (tmp_path / 'data' / 'x' / 'units.json').unlink()
    with pytest.raises(UserError, match='x/units.json: missing, damaged or of another version'):
        prepare(tmp_path, corpus=source)


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_data, 'BATCH', 20_000)
    small, _ = prepare(tmp_path, corpus=write_jsonl(tmp_path / 'a.jsonl', make_texts(300)))
    model = os.path.join(small, 'tokenizer', 'sentencepiece.model')
    peaks = []
    for size in (1000, 3000):
        source = write_jsonl(tmp_path / f'{size}.jsonl', make_texts(size))
        tracemalloc.start()
        prepare(tmp_path, corpus=source, tokenizer=f'sentencepiece:{model}', name=str(size))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


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


@pytest.mark.slow
def test_real_novels(tmp_path):
    unpack_novels('en_100_novels.tar.xz', 20, tmp_path)
    folder, meta = prepare(tmp_path, corpus=str(tmp_path / '*.txt'), vocab_size=2000,
                           tokenizer_sample=1_000_000, max_bytes=100_000)
    tokenizer = prepare_data.load_tokenizer(folder)
    train = read_split(folder, meta, 'train')
    assert sum(map(len, train)) > 10**6 and 5 < meta['unigram_entropy'] < np.log(2000)
    assert ' the ' in tokenizer.decode(train[0])


@pytest.mark.slow
def test_real_chinese_novels(tmp_path):
    pytest.importorskip('tokenizers')
    unpack_novels('zh_classics.tar.xz', 1, tmp_path)
    folder, meta = prepare(tmp_path, corpus=str(tmp_path / '*.txt'), tokenizer='character', vocab_size=3000,
                           segmenter='sentencepiece', segmenter_vocab=6000, tokenizer_sample=300_000,
                           max_bytes=50_000)
    tokenizer, ids, words = prepare_data.load_tokenizer(folder), [], []
    for shard in meta['splits']['train']:
        ids += np.fromfile(os.path.join(folder, f"{shard['stem']}.bin"), '<u2').tolist()
        words += np.fromfile(os.path.join(folder, f"{shard['stem']}.words"), np.uint8).tolist()
    assert len(ids) == len(words) > 400_000 and ids.count(meta['special']['unk']) < 0.02 * len(ids)
    text = ''.join('|' * word + tokenizer.pieces[item] for item, word in zip(ids, words, strict=True))
    common = collections.Counter(word for word in text.split('|') if len(word) == 2).most_common(20)
    assert {'行者', '师父', '八戒', '一个', '我们'} < set(dict(common))
