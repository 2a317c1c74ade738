"""Every fenced command of README.md runs as it stands there, with tiny overrides where it is long."""
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, TINY
from published import publish
from test_finetune import pretrained

from finetune import TASKS

with open(os.path.join(ROOT, 'README.md')) as readme:
    PAGE = readme.read()
COMMANDS = [command for block in re.findall(r'```sh\n(.*?)```', PAGE, re.S)
            for line in block.splitlines() for command in line.split(' && ')]
TINY_BENCH = ['--what=params,speed,partition', '--n_layer=2', '--n_head=4', '--n_embd=16', '--n_inner=32',
              '--lengths=16', '--step_tokens=32', '--rounds=1', '--warmup=1', '--vocab_size=400',
              '--dataset=wikipedia', '--device=cpu']
STARTS = 'quickstart', 'base_pairwise', 'base_original', 'base_shared', 'base_shatter', 'base_gau'
TINY_TRIALS = ['--trials=1', '--epochs=1', '--eval_interval=0', '--device=cpu', '--train_samples=8']
BERT = {'num_hidden_layers': 2, 'num_attention_heads': 4, 'hidden_size': 16, 'intermediate_size': 32,
        'max_position_embeddings': 32, 'vocab_size': 400}


@pytest.fixture(scope='module')
def home(corpus, tmp_path_factory):
    """A copy of the repository with the small corpus under every name that the page uses."""
    home = tmp_path_factory.mktemp('home')
    for name in os.listdir(ROOT):
        if name.endswith(('.py', '.txt', '.toml', '.md')):
            shutil.copy(os.path.join(ROOT, name), home)
    for name in ('config', 'tests', 'results'):
        shutil.copytree(os.path.join(ROOT, name), home / name)
    for name in ('oscar', 'wikipedia', 'books_wikipedia'):
        shutil.copytree(corpus, home / 'data' / name)
    return home


def changed(command):
    """`command` with what makes it small; the words that the page has stay in front."""
    words = shlex.split(command)
    if 'train.py' in words and '--help' not in words:
        quick = ['--max_iters=20', '--warmup_iters=2', '--eval_samples=64']
        words += quick if 'config/quickstart.py' in words else [*TINY, '--max_iters=4']
    if 'finetune.py' in words:
        offline = 'config/finetune_quickstart.py' in words
        words += TINY_TRIALS if offline else ['--data_dir=benchmarks', *TINY_TRIALS]
    if 'bench.py' in words:
        words += TINY_BENCH
    if 'prepare_data.py' in words:
        words += ['--vocab_size=200', '--val_fraction=0.1']
        words += ['--segmenter_vocab=100'] if '--segmenter=sentencepiece' in words else []
        if not any(word.startswith('--corpus=') for word in words):
            words += ['--tokenizer=sentencepiece', '--corpus=texts', '--text_field=body', '--name=tiny']
    if words[0] == 'torchrun':
        words = [sys.executable, '-m', 'torch.distributed.run', *words[1:], '--device=cpu']
        words = ['--nproc_per_node=2' if word == '--nproc_per_node=8' else word for word in words]
        words = [word.replace('HOST:29500', 'localhost:29511') for word in words]
    elif words[0] == 'python':
        words = [sys.executable, *words[1:]]
    else:
        words = [sys.executable, '-m', 'pytest', '--collect-only', '-q']
    return ['--init_from=bert' if word.startswith('--init_from=google-bert/') else word for word in words]


def prepare_for(words, home):
    """What the command needs besides the repository: texts, a BERT, an out_dir of its own."""
    (home / 'texts').mkdir(exist_ok=True)
    with open(home / 'texts' / 'a.jsonl', 'w') as file:
        for i in range(300):
            print(json.dumps({'body': f'{PAGE[i * 20:i * 20 + 300]} {i}'}), file=file)
    subprocess.run(['gzip', '-kf', 'a.jsonl'], cwd=home / 'texts', check=True)
    (home / 'novels').mkdir(exist_ok=True)
    for i in range(40):                                 # ideographs in pairs, which a segmenter can find
        pairs = ''.join(2 * chr(0x4e00 + (i * j * j) % 60) for j in range(1, 40))
        (home / 'novels' / f'{i}.txt').write_text(f'{pairs} word {pairs}')
    letters = [mark + chr(code) for mark in ('', '##') for code in range(33, 127)]
    (home / 'vocab.txt').write_text('\n'.join(['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]', *letters]))
    if any('wordpiece' in word for word in words):
        pytest.importorskip('tokenizers')
    if '--init_from=bert' in words:
        transformers = pytest.importorskip('transformers')
        transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).save_pretrained(home / 'bert')
        pieces = [f'piece{i}' for i in range(BERT['vocab_size'] - len(letters) - 5)]
        (home / 'bert' / 'vocab.txt').write_text((home / 'vocab.txt').read_text() + '\n'.join(['', *pieces]))
    if 'finetune.py' in words:
        for name in STARTS:
            pretrained(home / 'out' / name, str(home / 'data' / 'wikipedia'))
        for name in TASKS if not (home / 'benchmarks').exists() else ():
            if not TASKS[name].source:
                publish(name, home / 'benchmarks')
        shutil.copy(home / 'benchmarks' / 'squad' / 'train-v1.1.json', home / 'triviaqa.json')
        return
    if any(word.startswith('--export=') for word in words):
        pytest.importorskip('transformers')
    elif 'config/quickstart.py' not in words:
        shutil.rmtree(home / 'out', ignore_errors=True)


@pytest.mark.parametrize('command', [command for command in COMMANDS if not command.startswith('pip ')])
def test_command(command, home):
    """In the order of the page: --fill and --export use what the commands above them left."""
    words = changed(command)
    prepare_for(words, home)
    n_nodes = 2 if '--nnodes=2' in words else 1
    environment = {**os.environ, 'HF_HUB_OFFLINE': '1', 'PYTHONPATH': ''}
    nodes = [subprocess.Popen(words, cwd=home, env=environment, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for _ in range(n_nodes)]
    outputs = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0] * n_nodes, outputs
    out = ''.join(out for out, _ in outputs)
    if '--fill=' in command:
        assert re.search(r'returns the \[MASK\] of a matrix\n    \S+ 0\.\d{3}', out)
    elif 'bench.py' in command:
        assert 'Parameters' in out and '| original ' in out and '/ hf_bert' in out
    elif 'finetune.py' in command:
        assert '## Every metric' in out and 'majority' in out
    elif command == 'python train.py config/quickstart.py':
        assert 'unigram' in out and out.count('[MASK]') == out.count('masked: ') == 5
        assert (home / 'out' / 'quickstart' / 'loss.png').exists() or 'pip install matplotlib' in out


def test_the_page_has_its_commands_and_files():
    assert len(COMMANDS) >= 12 and COMMANDS[0] == 'pip install -r requirements.txt'
    for command in COMMANDS:
        for name in re.findall(r'[\w/-]+\.(?:py|txt)\b', command):
            assert os.path.exists(os.path.join(ROOT, name)) or name == 'vocab.txt', command
    listed = re.findall(r'^(\S+)  +\S', PAGE[PAGE.index('## Files'):], re.M)
    assert all(os.path.exists(os.path.join(ROOT, name)) for name in listed)
    stages = {name for name in os.listdir(ROOT) if name.endswith('.py')}
    assert stages <= set(listed)


def test_the_tables_of_systems_are_those_of_the_model():
    """Every row of ATTENTION and POSITION is there, in order, with the counts of its models."""
    from model import ALLOWED_POSITIONS, ATTENTION, POSITION
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
    import torch

    from model import EncoderConfig, MaskedLM
    with torch.device('meta'):
        model = MaskedLM(EncoderConfig(30522, 512, *shape, **settings))
    counted = model.encoder.blocks if matrices else model
    return f'{sum(p.numel() for p in counted.parameters() if p.dim() > 1 or not matrices):,}'
