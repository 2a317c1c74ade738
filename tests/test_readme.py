"""The commands of README.md, results/running.md and results/machines.md.

The first of each kind really run, on four packages of the standard library. The others are taken in process
as far as their data: knobs, config files, checkpoints, files, tasks. `-m slow` runs every command, made tiny.
"""
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from commands import READY, commands_of, prepared_names, read_page, resolved
from conftest import ROOT, TINY, stage
from published import publish
from test_finetune import pretrained

import finetune
import train
from configurator import UserError
from model import ALLOWED_POSITIONS, ATTENTION, POSITION, EncoderConfig, MaskedLM

PAGE = read_page('README.md')
PAGES = PAGE + read_page('results', 'running.md') + read_page('results', 'machines.md')
COMMANDS = commands_of(PAGES)
STAGES = [command for command in COMMANDS if '.py' in command]
FILL = 'python train.py config/quickstart.py --fill="returns the [MASK] of a matrix"'
FIRST = {               # really run, in this order -> what makes them small
    'python train.py config/quickstart.py': ['--max_iters=10', '--eval_samples=64', '--device=cpu'],
    FILL: ['--device=cpu'],
    'python finetune.py config/finetune_quickstart.py': [
        '--tasks=docstring_order', '--trials=1', '--epochs=1', '--train_samples=8', '--eval_samples=32',
        '--device=cpu'],
    'python bench.py': [
        '--what=params,speed', '--variants=original,shatter', '--peers=hf_bert', '--n_layer=2', '--n_head=4',
        '--n_embd=16', '--n_inner=32', '--lengths=16', '--batches=2', '--rounds=1', '--warmup=1',
        '--vocab_size=400', '--device=cpu'],
}
STARTS = ('quickstart', 'base_pairwise', 'base_original', 'base_pairwise-1', 'base_original-1',
          'kowsher_shared', 'base_gau')
BERT = {'num_hidden_layers': 2, 'num_attention_heads': 4, 'hidden_size': 16, 'intermediate_size': 32,
        'max_position_embeddings': 32, 'vocab_size': 400}


def copy_of_repository(home):
    """The repository in `home`, where the quickstart's corpus is four packages of the standard library."""
    for name in os.listdir(ROOT):
        if name.endswith(('.py', '.txt', '.toml', '.md')):
            shutil.copy(os.path.join(ROOT, name), home)
    for name in ('config', 'tests', 'results'):
        shutil.copytree(os.path.join(ROOT, name), home / name)
    with open(home / 'config' / 'data_docstrings.py', 'a') as file:
        file.write("path = 'email unittest asyncio logging'\n"
                   'vocab_size, val_fraction, num_proc = 400, 0.1, 1\n')
    return home


def check_output(command, out, home):
    if command == FILL:
        assert re.search(r'returns the \[MASK\] of a matrix\n    \S+ 0\.\d{3}', out)
    elif command == 'python train.py config/quickstart.py':
        assert 'unigram' in out and len(re.findall(r'\[MASK\] .*\n.*\n    masked: .*, rank \d+ of', out)) == 5
        assert (home / 'out' / 'quickstart' / 'loss.png').exists() or 'pip install matplotlib' in out
    elif command == 'python bench.py':
        assert 'Parameters' in out and '| original ' in out and '/ hf_bert' in out
    elif 'finetune.py' in command:
        assert '## Every metric' in out and 'majority' in out


@pytest.fixture(scope='module')
def quick_home(tmp_path_factory):
    return copy_of_repository(tmp_path_factory.mktemp('quick'))


@pytest.mark.parametrize('command', FIRST)
def test_the_first_commands_run(command, quick_home):
    """In the order of the page: each uses what the ones above it left."""
    assert command in COMMANDS
    words = shlex.split(command)[1:] + FIRST[command]
    done = stage(*words, cwd=quick_home, env={**os.environ, 'PYTHONPATH': ''})
    assert done.returncode == 0, done.stderr
    check_output(command, done.stdout + done.stderr, quick_home)


# ---- every command, in process ----

@pytest.fixture(scope='module')
def files_home(corpus, tmp_path_factory):
    """What the page's commands read: texts, benchmarks as published, checkpoints, prepared corpora."""
    home = tmp_path_factory.mktemp('files')
    for name in ('fineweb', 'wikipedia'):
        shutil.copytree(corpus, home / 'data' / name)
    write_texts(home)
    write_benchmarks(home)
    return home


def write_texts(home):
    (home / 'texts').mkdir()
    with open(home / 'texts' / 'a.jsonl', 'w') as file:
        for i in range(300):
            print(json.dumps({'body': f'{PAGE[i * 20:i * 20 + 300]} {i}'}), file=file)
    subprocess.run(['gzip', '-k', 'a.jsonl'], cwd=home / 'texts', check=True)
    (home / 'novels').mkdir()
    for i in range(40):                                 # ideographs in pairs, which a segmenter can find
        pairs = ''.join(2 * chr(0x4e00 + (i * j * j) % 60) for j in range(1, 40))
        (home / 'novels' / f'{i}.txt').write_text(f'{pairs} word {pairs}')
    letters = [mark + chr(code) for mark in ('', '##') for code in range(33, 127)]
    (home / 'vocab.txt').write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *letters]))


def write_benchmarks(home):
    for name in finetune.TASKS:
        if finetune.TASKS[name].hub:
            publish(name, home / 'benchmarks')
    for name in ('a.csv', 'b.csv'):
        (home / name).write_text('question,answer,class\nwho?,"me, I",yes\nwhen?,now,no\n')
    shutil.copy(home / 'benchmarks' / 'squad' / 'train-v1.1.json', home / 'triviaqa.json')
    for name in STARTS:
        pretrained(home / 'out' / name, str(home / 'data' / 'wikipedia'))


@pytest.mark.parametrize('command', STAGES)
def test_a_command_finds_its_knobs_files_and_tasks(command, files_home, monkeypatch):
    module, config = resolved(command)
    monkeypatch.chdir(files_home)
    READY[module](config)
    if module is train:
        assert config['dataset'] in prepared_names(PAGES)


def test_a_wrong_command_is_noticed(files_home, monkeypatch):
    """What the test above rests on: knobs, config files, names and files that are not there are refused."""
    monkeypatch.chdir(files_home)
    for wrong in ('train.py --no_knob=1', 'train.py config/none.py', 'train.py --attention=none',
                  'finetune.py --tasks=none', 'finetune.py --init_from=out/none', 'bench.py --variants=none',
                  "prepare_data.py --corpus='none/*.txt'", 'prepare_data.py --check=data/none'):
        with pytest.raises(UserError):
            module, config = resolved(wrong)
            READY[module](config)


# ---- every command, for real ----

@pytest.fixture(scope='module')
def home(corpus, tmp_path_factory):
    home = copy_of_repository(tmp_path_factory.mktemp('home'))
    for name in ('fineweb', 'wikipedia'):
        shutil.copytree(corpus, home / 'data' / name)
    write_texts(home)
    write_benchmarks(home)
    shutil.rmtree(home / 'out' / 'quickstart')          # its own command makes it
    transformers = pytest.importorskip('transformers')
    transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).save_pretrained(home / 'bert')
    letters = (home / 'vocab.txt').read_text()
    pieces = [f'piece{i}' for i in range(BERT['vocab_size'] - len(letters.split('\n')))]
    (home / 'bert' / 'vocab.txt').write_text('\n'.join([letters, *pieces]))
    return home


def made_small(command):
    """The words of `command`, with what makes it small after those of the page."""
    words = shlex.split(command)
    if command in FIRST:
        words += FIRST[command]
    elif 'train.py' in words:
        words += ['--max_iters=20', '--eval_samples=64'] if 'config/quickstart.py' in words else TINY
    elif 'finetune.py' in words:
        words += ['--data_dir=benchmarks', '--trials=1', '--epochs=1', '--train_samples=8', '--device=cpu']
    elif 'bench.py' in words:
        words += FIRST['python bench.py']
    elif 'prepare_data.py' in words and '--check=' not in command:
        words += ['--vocab_size=200', '--val_fraction=0.1']
        words += ['--segmenter_vocab=100'] if '--segmenter=sentencepiece' in words else []
        if '--corpus=' not in command:
            words += ['--tokenizer=sentencepiece', '--corpus=texts', '--text_field=body', '--name=tiny']
    if 'train.py' in words and 'config/quickstart.py' not in words and '--max_iters=' not in command:
        words += ['--max_iters=4']
    return words


def start_of(words):
    """The words of a process on this machine: python or torchrun with two processes, nothing from the hub."""
    if words[0] == 'pytest':
        return [sys.executable, '-m', 'pytest', '--collect-only', '-q']
    if words[0] == 'torchrun':
        words = ['-m', 'torch.distributed.run', *words[1:], '--device=cpu']
    words = [sys.executable, *words[words[0] == 'python':]]
    words = ['--nproc_per_node=2' if word == '--nproc_per_node=8' else word for word in words]
    words = ['--init_from=bert' if word.startswith('--init_from=google-bert/') else word for word in words]
    return [word.replace('HOST:29500', 'localhost:29511') for word in words]


@pytest.mark.slow
@pytest.mark.parametrize('command', [command for command in COMMANDS if not command.startswith('pip ')])
def test_every_command_runs(command, home):
    """In the order of the page: --fill, --export and --check use what the commands above them left."""
    words = start_of(made_small(command))
    if 'train.py config/base' in command and '--export=' not in command:
        shutil.rmtree(home / resolved(command)[1]['out_dir'], ignore_errors=True)       # not to be resumed
    nodes = [subprocess.Popen(words, cwd=home, env={**os.environ, 'PYTHONPATH': ''}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
             for _ in range(2 if '--nnodes=2' in words else 1)]
    outputs = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0] * len(nodes), outputs
    check_output(command, ''.join(itertools.chain(*outputs)), home)


# ---- the page itself ----

def test_the_page_has_its_commands_and_links():
    assert len(COMMANDS) >= 12 and COMMANDS[0] == 'pip install -r requirements.txt'
    for command in COMMANDS:
        for name in re.findall(r'[\w/-]+\.(?:py|txt)\b', command):
            assert os.path.exists(os.path.join(ROOT, name)) or name == 'vocab.txt', command
    for folder, page in (('.', 'README.md'), ('results', 'running.md'), ('results', 'machines.md')):
        for link in re.findall(r'\]\(([^):#]+)\)', read_page(folder, page)):
            assert os.path.exists(os.path.join(ROOT, folder, link)), link


def test_the_tables_of_systems_are_those_of_the_model():
    """Every row of ATTENTION and POSITION is there, in order, with the counts of its models."""
    number, page = r'([\d,]+)', PAGE[PAGE.index('## Systems'):PAGE.index('## Pretrain')]
    shared = re.findall(rf'^\| `(\w+)` \|.*\| {number} \| {number} \| {number} \|$', page, re.M)
    order = re.findall(rf'^\| `(\w+)` \|[^|]*\|[^|]*\| {number} \|$', page, re.M)
    own = re.findall(rf'^\| `(\w+)` \|[^|]*\|[^|]*\| {number} \| {number}? ?\|$', page, re.M)
    assert [row[0] for row in shared + own] == list(ATTENTION)
    assert [row[0] for row in order] == list(POSITION)
    for row in shared:
        assert list(row[1:]) == [count(shape, attention=row[0]) for shape in SHAPES]
    for position, printed in order:
        assert printed == count(SHAPES[1], position=position)
    for attention, printed, matrices in own:
        gau = {'norm': 'rms', 'bias': False, 'lm_head': 'decoder'} if attention == 'gau' else {}
        shape = (24, *SHAPES[1][1:]) if attention == 'gau' else SHAPES[1]
        settings = {'attention': attention, 'position': ALLOWED_POSITIONS[attention][0], **gau}
        assert printed == count(shape, **settings)
        assert matrices in ('', count(shape, matrices=True, **settings))


SHAPES = (4, 8, 512, 2048), (12, 12, 768, 3072), (24, 16, 1024, 4096)


def count(shape, matrices=False, **settings):
    """Parameters of a masked LM, or of the matrices of its blocks, as the page prints them."""
    def counted(n_layer):
        with torch.device('meta'):
            model = MaskedLM(EncoderConfig(30522, 512, n_layer, *shape[1:], **settings))
        part = model.encoder.blocks if matrices else model
        return sum(p.numel() for p in part.parameters() if p.dim() > 1 or not matrices)
    one, two = counted(1), counted(2)                   # all blocks are alike
    return f'{one + (shape[0] - 1) * (two - one):,}'
