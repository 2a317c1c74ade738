"""The second floor of a stage file can be deleted, section by section: a plain run is the same to the bit.

    $ python -m pytest -m slow tests/test_floors.py

Each case deletes a section, by its title, and the other places that name it.
"""
import random
import re
import shutil

import pytest
from conftest import ROOT, process, tiny, words
from records import make_class, write_copy
from test_train import assert_equal, last, same_run

pytestmark = pytest.mark.slow
# Title of a section -> other places: (text, what replaces it), or a text whose lines are deleted, with the
# lines below them that are indented deeper.
TRAIN = {
    'documents': [(", 'documents': DocumentRows", '')],
    'whole words': [(', True: WholeWordMasker', '')],
    'permutation': ["'plm': Objective"],
    'validation': ['further_loaders(meta, config)'],
    'schedules': [(", 'cosine': cosine, 'constant': constant, 'thirds': thirds", '')],
    'XLA': [("{'xla': (XlaRuntime, connect_xla)}", '{}')],
}
PREPARE = {
    r'\.json files': ["'.json': read_json_rows",
                      (" or (ending == '.json' and not is_one_value(file))", '')],
    r'\.parquet files': ["'.parquet': read_parquet"],
    'compressed files': [("{'.gz': 'gzip', '.zst': 'zstd'}", '{}'), "if ending in COMPRESSION:"],
    'joined rows': ["if unit['joined'] not in", "'wikitext': ", "'books': "],
    'the hub': ["elif re.fullmatch(r'[", "if unit['hub']:", "Source('hub', ", "'hub': hub_units"],
    'OSCAR': ['passes=passes_oscar'],
    'docstrings': ["'docstrings': "],
    'characters': ["'character': "],
    'tiktoken': ["'tiktoken': "],
    'Chinese words': ["'jieba': "],
    'machines': [("find_machine(config['part'])", '0, 1'), 'wait_for_plan(folder, machine'],
}
FINETUNE = {
    'labelling': ["if given.predict not in ('', 'test'):"],
    'files of your own': ["'custom': ", "'macro_f1': ", ': read_table', ': read_lines', ': read_array',
                          (', adapt=squad_from_files', '')],
    'records of their own': ["'multirc': ", "'wsc': "],
    'numbers': ["'regress': ", "spearman': ", "'stsb': "],
    'choices': ["'choose': ", "'chid': ", "'c3': "],
    'Chinese': ["exact_chinese': ", "'f1_characters': ", "'cmrc': ", "'exact_f1_chinese': "],
    'spans': ["'span': ", "'exact': ", "'f1_words': ", "'squad1': ", "'squad2': "],
    'reports': [('*parts, *paired_tables(frame, against), *class_tables(results)', '*parts'),
                'confused = confusions('],
    'starts': ["if not path.endswith('.pt'):", 'without_other_head(pretrained', 'if other:',
               'find_other_start(path, source)', ('evaluate_again(trial, given, alone)', 'pass')],
    'options': [('overridden(name, given)', 'given'), 'better_step(best', '_, parameters = best',
                'if parameters:'],
}
NEEDS = {'spans': ['Chinese'], 'files of your own': ['labelling'], 'starts': ['labelling']}


def cases(sections):
    """Each section alone, but for those that need it, and all together."""
    return pytest.mark.parametrize(
        'titles', [*([*NEEDS.get(title, []), title] for title in sections), list(sections)], ids=', '.join)


def without(text, sections, titles):
    """The text of a stage file without some sections, and without the places that `sections` names."""
    for title in titles:
        text, n = re.subn(rf'(?ms)^# ---- \d+\. {title}\b.*?(?=^# ---- \d|^# ====)', '', text)
        assert n == 1, title
        for place in sections[title]:
            if isinstance(place, tuple):
                assert place[0] in text, place
                text = text.replace(*place)
            else:
                text, n = re.subn(rf'(?m)^( *)(?=\S).*{re.escape(place)}.*\n(?:\1 +.*\n)*', '', text)
                assert n, place
    return text


@pytest.fixture
def fork(tmp_path):
    """fork('train.py', TRAIN, titles): a copy of the project without these sections of a file -> its path"""
    def make(name, sections, titles):
        shutil.copytree(ROOT, tmp_path / 'fork', ignore=shutil.ignore_patterns('.*', 'out', 'data', 'tests'))
        path = tmp_path / 'fork' / name
        path.write_text(without(path.read_text(), sections, titles))
        found = process('-m', 'ruff', 'check', '--select=F821', path)
        assert found.code == 0, found.out               # names that are nowhere
        return path
    return make


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp('whole') / 'run'
    done = process('train.py', *tiny(corpus, folder, fill_samples=2))
    assert done.code == 0, done.err
    return folder


@cases(TRAIN)
def test_training(titles, fork, whole, corpus, tmp_path):
    path = fork('train.py', TRAIN, titles)
    done = process(path, *tiny(corpus, tmp_path / 'run', fill_samples=2), cwd=path.parent)
    assert done.code == 0, done.err
    same_run(whole, tmp_path / 'run')


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp('texts') / 'a.jsonl'
    path.write_text(''.join(f'{{"text": "The {n}th of the texts, and of its {n % 7} words."}}\n'
                            for n in range(3000)))
    return path


def prepared(script, texts, data_dir, **keywords):
    """{name: bytes} of the files of a corpus."""
    done = process(script, *words(corpus=texts, name='a', data_dir=data_dir, vocab_size=100,
                                  unit_bytes=50_000, num_proc=1, tokenizer='sentencepiece'), **keywords)
    assert done.code == 0, done.err
    return {path.name: path.read_bytes() for path in (data_dir / 'a').rglob('*.[bim]*')}


@cases(PREPARE)
def test_preparing(titles, fork, texts, tmp_path):
    path = fork('prepare_data.py', PREPARE, titles)
    ours = prepared(path, texts, tmp_path, cwd=path.parent)
    theirs = prepared('prepare_data.py', texts, tmp_path / 'whole')
    assert len(ours) > 5
    assert ours == theirs


@pytest.fixture(scope='module')
def copies(tmp_path_factory):
    """Folder of made-up records of RTE."""
    folder = tmp_path_factory.mktemp('copies')
    pick = random.Random(1)
    write_copy(folder, 'rte', {split: [make_class('rte', i, pick, split == 'test') for i in range(16)]
                               for split in ('train', 'validation', 'test')})
    return folder


def tuned(script, run, copies, out_dir, **keywords):
    """Content of the model of a trial of RTE."""
    done = process(script, *words(init_from=run, tasks='rte', data_dir=copies, out_dir=out_dir, trials=1,
                                  epochs=2, block_size=32, device='cpu', dtype='float32'), **keywords)
    assert done.code == 0, done.err
    return last(out_dir / 'run' / 'rte_1')


@cases(FINETUNE)
def test_fine_tuning(titles, fork, whole, copies, tmp_path):
    path = fork('finetune.py', FINETUNE, titles)
    ours = tuned(path, whole, copies, tmp_path / 'ours', cwd=path.parent)
    theirs = tuned('finetune.py', whole, copies, tmp_path / 'whole')
    assert_equal(ours['model'], theirs['model'])
