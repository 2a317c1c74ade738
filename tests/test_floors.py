"""The first floor of a stage file is the plain case, whole; the second can be deleted, section by section.

    $ python -m pytest -m slow tests/test_floors.py

A trace shows that a plain run needs every line of the first floor. Each other case deletes a section of the
second, by its title, and the other places that name it: a plain run is the same to the bit.
"""
import ast
import random
import re
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, process, tiny, words
from records import make_class, write_copy
from test_train import assert_equal, last, metrics

pytestmark = pytest.mark.slow
# Title of a section -> other places: (text, what replaces it), or a text whose lines are deleted, with the
# lines below them that are indented deeper.
TRAIN = dict.fromkeys(['documents', 'whole words', 'permutation', 'validation', 'schedules', 'XLA'], ())
PREPARE = {
    **dict.fromkeys([r'\.json files', r'\.parquet files', 'compressed files', 'OSCAR', 'docstrings',
                     'characters', 'tiktoken', 'Chinese words'], ()),
    'joined rows': ["if unit['joined'] not in"],
    'the hub': ["elif re.fullmatch(r'[", "if unit['hub']:"],
    'machines': [("find_machine(config['part'])", '0, 1'), 'wait_for_plan(folder, machine'],
}
FINETUNE = dict.fromkeys(['tasks of GLUE', 'numbers', 'choices', 'spans', 'Chinese', 'files of your own',
                          'reports', 'starts', 'labelling', 'options'], ())
SECTIONS = {'train.py': TRAIN, 'prepare_data.py': PREPARE, 'finetune.py': FINETUNE}
NEEDS = {
    'tasks of GLUE': ['numbers', 'spans', 'Chinese', 'files of your own', 'labelling'],
    'spans': ['Chinese'],
    'files of your own': ['spans', 'Chinese', 'labelling'],
    'starts': ['labelling'],
}


def without(text, sections, titles):
    """The text of a stage file without some sections, and without the places that `sections` names.

    A line that ends with a comment `# section 16` goes with that section, and the `if` or `else` above it.
    """
    for title in titles:
        number, = re.findall(rf'(?m)^# ---- (\d+)\. {title}\b', text)
        text = re.sub(rf'(?ms)^# ---- {number}\. .*?(?=^# ---- \d|^# ====)', '', text)
        text = re.sub(rf'(?m)^(?: *(?:if .*|else):\n)?.*  # section {number}\b.*\n', '', text)
        for place in sections[title]:
            if isinstance(place, tuple):
                assert place[0] in text, place
                text = text.replace(*place)
            else:
                text, n = re.subn(rf'(?m)^( *)(?=\S).*{re.escape(place)}.*\n(?:\1 +.*\n)*', '', text)
                assert n, place
    return text


@pytest.fixture(scope='module')
def plain(tmp_path_factory):
    """plain(project, folder) runs each stage of a project -> files of the corpus, run, trial of RTE"""
    source = tmp_path_factory.mktemp('source')
    corpus = source / 'corpus'
    corpus.mkdir()
    (corpus / 'b.txt').write_text('Between the blank lines\n\nof a text\n')
    (corpus / 'a.jsonl').write_text(''.join(
        f'{{"text": "The {n}th of the texts, and of its {n % 7} words."}}\n' for n in range(3000)))
    pick = random.Random(1)
    write_copy(source, 'rte', {split: [make_class('rte', i, pick, split == 'test') for i in range(16)]
                               for split in ('train', 'validation', 'test')})

    def start(project, folder, *before, max_iters=8, trials=1):
        stages = {
            'prepare_data': words(corpus=corpus, name='a', data_dir=folder, vocab_size=100,
                                  unit_bytes=50_000, num_proc=1, tokenizer='sentencepiece'),
            'train': tiny(str(folder / 'a'), folder / 'run', fill_samples=2, batch_size=4,
                          max_iters=max_iters),
            'finetune': words(init_from=folder / 'run', tasks='rte', data_dir=source,
                              out_dir=folder / f'tuned_{max_iters}',
                              trials=trials, epochs=2, block_size=32, device='cpu', dtype='float32')}
        for name, arguments in stages.items():
            done = process(*before, f'{project}/{name}.py', *arguments, cwd=project)
            assert done.code == 0, done.err
        files = {path.name: path.read_bytes() for path in (folder / 'a').rglob('*.[bim]*')}
        assert len(files) > 5
        ours, tuned = last(folder / 'run'), last(folder / f'tuned_{max_iters}' / 'run' / 'rte_1')
        return files, metrics(folder / 'run'), ours['model'], ours['optimizer'], tuned['model']
    return start


# Runs a script and adds the lines of the repository that ran to a file. The module trace of Python would take
# any other module of the name `model` for ours.
TRACER = """
import os, runpy, sys, threading
folder, out, *sys.argv = sys.argv[1:]
ran = set()

def trace(frame, event, argument):
    parent, name = os.path.split(frame.f_code.co_filename)
    if parent != folder:
        return None
    ran.add(f'{name} {frame.f_lineno}')
    return trace

sys.path.insert(0, folder)
threading.settrace(trace)
sys.settrace(trace)
try:
    runpy.run_path(sys.argv[0], run_name='__main__')
finally:
    sys.settrace(None)
    with open(out, 'a') as file:
        print(*ran, sep='\\n', file=file)
"""


def needless_lines(text, ran):
    """Numbers of the lines of the first floor that a plain run does without.

    Refusals do not count, nor the line of an `if` or of a method that has only one.
    ran  the numbers of the lines that ran
    """
    floor = text[:text.index('\n# ====')].count('\n')
    missed = []

    def visit(around):
        for name in ('body', 'orelse', 'finalbody'):
            block = [x for x in getattr(around, name, [])
                     if not isinstance(getattr(x, 'value', x), ast.Constant)]           # a docstring
            for x in block:
                is_alone = len(block) == 1 and isinstance(around, (ast.If, ast.FunctionDef))
                if ran & {*range(x.lineno, x.end_lineno + 1)}:
                    visit(x)
                elif x.lineno <= floor and not is_alone and not isinstance(x, ast.Raise):
                    missed.append(x.lineno)
    visit(ast.parse(text))
    return missed


def test_every_line_of_the_first_floors_runs_in_the_plain_case(plain, tmp_path):
    """Each stage begins, goes on and has nothing left to do."""
    tracer, lines = tmp_path / 'tracer.py', tmp_path / 'lines'
    tracer.write_text(TRACER)
    for knobs in {'max_iters': 4}, {}, {'trials': 2}:
        plain(ROOT, tmp_path, tracer, ROOT, lines, **knobs)
    ran = {tuple(line.split()) for line in lines.read_text().splitlines()}
    for name in ('model.py', 'prepare_data.py', 'train.py', 'finetune.py'):
        text = Path(ROOT, name).read_text()
        needless = needless_lines(text, {int(line) for file, line in ran if file == name})
        assert not needless, [f'{name}:{line}: {text.splitlines()[line - 1]}' for line in needless]


@pytest.fixture(scope='module')
def whole(plain, tmp_path_factory):
    return plain(ROOT, tmp_path_factory.mktemp('whole'))


@pytest.mark.parametrize('name, titles', [
    (name, titles) for name, sections in SECTIONS.items()
    for titles in [*([*NEEDS.get(title, []), title] for title in sections), list(sections)]], ids=str)
def test_the_plain_case_does_without(name, titles, plain, whole, tmp_path):
    """Each section is deleted alone, but for those that need it, and all together."""
    fork = tmp_path / 'fork'
    shutil.copytree(ROOT, fork, ignore=shutil.ignore_patterns('.*', 'out', 'data', 'tests'))
    path = fork / name
    path.write_text(without(path.read_text(), SECTIONS[name], titles))
    found = process('-m', 'ruff', 'check', '--select=F821', path)
    assert found.code == 0, found.out                   # names that are nowhere
    assert_equal(plain(fork, tmp_path), whole)
