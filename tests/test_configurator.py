"""configurator.py: knobs <- config files <- command line, and every way to get them wrong."""
import glob
import io
import os
import re
import signal
import sys

import pytest
from conftest import ROOT, real_stage, refused, seen, stage, terminal
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import bench
import configurator
import finetune
import prepare_data
import train
from configurator import UserError, configure
from model import model_config

CONFIGS = sorted(glob.glob(os.path.join(ROOT, 'config', '*.py')))
STAGES = {'train': train, 'finetune': finetune, 'bench': bench, 'prepare_data': prepare_data}
STAGE = '''"""A stage for tests."""
from configurator import configure, run
n_layer = 12                    # blocks
learning_rate = 1e-4            # peak
unbounded = float('inf')        # a limit
compile = True                  # or not
name = 'x'                      # free text
milestones = ()                 # steps
LIMIT = 3                       # no knob
def main():
    config, origins = configure(globals())
    print(config, origins, n_layer)
if __name__ == '__main__':
    run(main)
'''


def scope():
    names = {'n_layer': 12, 'learning_rate': 1e-4, 'unbounded': float('inf'), 'compile': True, 'name': 'x',
             'milestones': (), 'LIMIT': 3, '_private': 1}
    return {**names, '__file__': __file__, '__doc__': ''}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / 'stage.py'
    path.write_text(STAGE)
    return str(path)


def write(folder, text, name='c.py'):
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize('argument, key, value', [
    ('--n_layer=3', 'n_layer', 3), ('--n_layer=1_000', 'n_layer', 1000),
    ('--learning_rate=1', 'learning_rate', 1.0), ('--compile=FALSE', 'compile', False),
    ('--compile=true', 'compile', True), ('--name=2024', 'name', '2024'), ('--name=x=y', 'name', 'x=y'),
    ('--name=', 'name', ''), ('--name=nan', 'name', 'nan'), ('--unbounded=inf', 'unbounded', float('inf')),
    ('--milestones=1000,2000', 'milestones', (1000, 2000)), ('--milestones=', 'milestones', ()),
])
def test_values_on_the_command_line(argument, key, value):
    names = scope()
    config, origins = configure(names, [argument])
    assert config[key] == value and type(config[key]) is type(value) and names[key] == value
    assert origins == {key: 'command line'}


def test_left_to_right_last_wins(tmp_path):
    first, second = write(tmp_path, 'n_layer = 1\nname = "a"'), write(tmp_path, 'n_layer = 2', 'd.py')
    config, origins = configure(scope(), ['--name=z', first, second, '--learning_rate=3'])
    assert (config['n_layer'], config['name'], config['learning_rate']) == (2, 'a', 3.0)
    assert origins == {'n_layer': second, 'name': first, 'learning_rate': 'command line'}
    assert configure(scope(), [second, '--n_layer=5', first])[0]['n_layer'] == 1


def test_config_files_keep_their_helpers(tmp_path):
    path = write(tmp_path, 'import math\ndef half(x):\n    return x // 2\n_size = 8\nn_layer = half(_size)\n'
                           'milestones = [1, 2]\nlearning_rate = 1')
    config, _ = configure(scope(), [path])
    assert config == {**configure(scope(), [])[0], 'n_layer': 4, 'milestones': (1, 2), 'learning_rate': 1.0}
    assert 'LIMIT' not in config and '_private' not in config


def test_a_star_import_names_its_file(tmp_path, monkeypatch):
    (tmp_path / 'config').mkdir()
    write(tmp_path / 'config', 'learnng_rate = 1e-3', 'base.py')
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name == 'config' or name.startswith('config.')]:
        monkeypatch.delitem(sys.modules, name)
    path = write(tmp_path, 'from config.base import *\nn_layer = 3')
    with pytest.raises(UserError, match=r"base\.py: no such key 'learnng_rate', did you mean 'learning"):
        configure(scope(), [path])
    for name in [name for name in sys.modules if name == 'config' or name.startswith('config.')]:
        del sys.modules[name]


def test_the_origin_is_the_innermost_file_with_the_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    origins = configure(dict(vars(train)), ['config/small_pairwise.py'])[1]
    assert origins['dataset'] == 'config/base.py' and origins['n_layer'] == 'config/small.py'
    assert origins['out_dir'] == 'config/small_pairwise.py'


BAD_LINES = {
    '--n_layr=3': "command line: no such key 'n_layr', did you mean 'n_layer'?",
    '--LIMIT=3': "no such key 'LIMIT'",
    '--zzzzz=3': "no such key 'zzzzz', see --help",
    '--n_layer=3.0': "n_layer='3.0': must be a whole number",
    '--n_layer=three': "n_layer='three': must be a whole number",
    '--n_layer=': "n_layer='': must be a whole number",
    '--n_layer=true': "n_layer='true'",
    '--n_layer': '--n_layer needs a value: --n_layer=VALUE',
    '--learning_rate=fast': "learning_rate='fast': must be a finite number",
    '--learning_rate=nan': 'learning_rate=nan: must be a finite number',
    '--learning_rate=inf': 'learning_rate=inf: must be a finite number',
    '--unbounded=nan': 'unbounded=nan: must be a finite number',
    '--compile=1': "compile='1': must be true or false",
    '--compile=yes': "compile='yes': must be true or false",
    '--milestones=1,x': "milestones='1,x': must be whole numbers",
    '-n_layer=3': "no such key '-n_layer', did you mean 'n_layer'?",
    '--': '-- needs a value',
    'missing.py': 'missing.py: no such config file',
    '.': '.: no such config file',
}


@pytest.mark.parametrize('argument', BAD_LINES)
def test_malformed_command_lines(argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        configure(scope(), [argument])
    assert BAD_LINES[argument] in str(error.value) and '\n' not in str(error.value)


BAD_FILES = {
    'n_layer = = 3': 'c.py: SyntaxError: invalid syntax (c.py, line 1)',
    'n_layer = 3\nname = 1 / 0': 'c.py:2)',
    'raise SystemExit(0)': 'c.py:1)',
    'import nothing_like_this': "ModuleNotFoundError: No module named 'nothing_like_this' (",
    'n_layer = True': 'c.py: n_layer=True: must be a whole number',
    'n_layer = 3.0': 'c.py: n_layer=3.0: must be a whole number',
    'compile = 1': 'c.py: compile=1: must be true or false',
    'name = None': 'c.py: name=None: must be a str',
    'learning_rate = "1"': "c.py: learning_rate='1': must be a finite number",
    'learning_rate = float("nan")': 'c.py: learning_rate=nan: must be a finite number',
    'milestones = (1, 2.5)': 'c.py: milestones=(1, 2.5): must be whole numbers',
    'n_layr = 3': "c.py: no such key 'n_layr', did you mean 'n_layer'?",
    'settings = {"n_layer": 3}': "c.py: no such key 'settings'",
    'n_layer = 3\n\0': 'c.py',
}


@pytest.mark.parametrize('text', BAD_FILES)
def test_malformed_config_files(text, tmp_path):
    with pytest.raises(UserError) as error:
        configure(scope(), [write(tmp_path, text)])
    assert BAD_FILES[text] in str(error.value) and '\n' not in str(error.value)


@pytest.mark.parametrize('argument', ['--n_layr=3', 'missing.py', '--compile=1'])
def test_a_stage_says_one_line_and_exits_with_2(script, argument):
    assert refused(stage(script, argument, env={**os.environ, 'PYTHONPATH': ROOT})).startswith('error: ')


def test_a_failed_override_changes_nothing():
    names = scope()
    with pytest.raises(UserError):
        configure(names, ['--n_layer=3', '--name=y', '--n_layr=3'])
    assert names == scope()


def test_help_lists_knobs_comments_and_config_files():
    text = stage('train.py', '--help').stdout
    for name in configure(vars(train), [])[0]:
        assert f'--{name}=' in text
    assert '--learning_rate=0.0001' in text and 'sequences per device and micro-step' in text
    for path in CONFIGS:
        assert f'config/{os.path.basename(path)}' in text


def stage_of(path):
    """The stage that a config file is for: its header launches it."""
    with open(path) as file:
        header = re.match(r'(# .*\n)+', file.read())[0]
    found = re.findall(rf'^# \$ .*?(\w+)\.py config/{os.path.basename(path)}', header, re.M)
    assert found and len(set(found)) == 1, path
    return found[0]


@pytest.mark.parametrize('path', CONFIGS, ids=os.path.basename)
def test_every_config_file_loads(path):
    stage = stage_of(path)
    config, origins = configure(dict(vars(STAGES[stage])), [path])
    assert origins
    if stage == 'train':
        train.check_knobs(config)
        model_config(config, 30522)
    if stage == 'finetune':
        assert config['out_dir'] == f'out/{os.path.basename(path)[:-3]}'
        for task in finetune.find_tasks(config['tasks']):
            finetune.recipe(config, task)


@pytest.mark.parametrize('name', ['quickstart', 'base_pairwise'])
def test_config_files_are_found_from_anywhere(name, tmp_path, monkeypatch):
    """As given, then in the repository."""
    monkeypatch.chdir(tmp_path)
    config, origins = configure(dict(vars(train)), [f'config/{name}.py'])
    assert config['out_dir'] == f'out/{name}' and origins['out_dir'] == f'config/{name}.py'
    (tmp_path / 'config').mkdir()
    (tmp_path / 'config' / f'{name}.py').write_text("out_dir = 'mine'")
    assert configure(dict(vars(train)), [f'config/{name}.py'])[0]['out_dir'] == 'mine'


# ---- the process around a stage ----

def closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, 'w')                           # noqa: SIM115


def mistake():
    raise UserError('bad luck')


def test_a_closed_stderr_is_no_error(monkeypatch):
    for stream in (closed_pipe(), None):
        monkeypatch.setattr(sys, 'stderr', stream)
        configurator.say('a notice')
        with pytest.raises(SystemExit) as end:
            configurator.run(mistake)
        assert end.value.code == 2


def test_a_closed_stdout_ends_a_stage_quietly(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'stdout', closed_pipe())
    with pytest.raises(SystemExit) as end:
        configurator.run(lambda: print('line'))
    assert end.value.code == 128 + signal.SIGPIPE and not capsys.readouterr().err


def test_text_of_any_language_prints_in_any_encoding(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), 'ascii')
    monkeypatch.setattr(sys, 'stdout', stream)
    configurator.run(lambda: print('\u4e2d \udcff'))
    assert stream.buffer.getvalue() == b'\\u4e2d \\udcff\n'


def test_an_error_of_another_rank_is_said_after_a_while(monkeypatch, capsys):
    waits = []
    monkeypatch.setenv('LOCAL_RANK', '1')
    monkeypatch.setattr(configurator.time, 'sleep', waits.append)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        configurator.say('a notice')
        with pytest.raises(SystemExit) as end:
            configurator.run(mistake)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert end.value.code == 2 and waits == [3]
    assert capsys.readouterr().err == 'error on local rank 1: bad luck\n'


def test_an_interrupt_leaves_the_cursor_below_the_bar():
    def interrupted():
        for _ in prepare_data.progress([0], 1, 'step'):
            raise KeyboardInterrupt
    with terminal() as texts, pytest.raises(SystemExit) as end:
        configurator.run(interrupted)
    first, cursor = seen(texts)
    assert (end.value.code, first, cursor.strip()) == (130, 'interrupted', '') and '0/1' in texts[0]


def test_torchruns_summary_shows_the_line(monkeypatch, tmp_path, capsys):
    """In its own reader of the file; a file that cannot be written changes nothing."""
    for path in (tmp_path / 'error.json', tmp_path / 'gone' / 'error.json'):
        monkeypatch.setenv('TORCHELASTIC_ERROR_FILE', str(path))
        with pytest.raises(SystemExit) as end:
            configurator.run(mistake)
        assert end.value.code == 2 and capsys.readouterr().err == 'error: bad luck\n'
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / 'error.json'))
    assert re.search(r'exitcode  : 2 .*\n.*\n  traceback : error: bad luck\n',
                     str(ChildFailedError('train.py', {0: failure})))


@pytest.mark.parametrize('script', ['prepare_data', 'train', 'finetune', 'bench'])
def test_an_interrupt_during_the_imports_is_quiet(script, tmp_path):
    """A numpy that is interrupted while it is imported: the first package that a stage asks for."""
    (tmp_path / 'numpy.py').write_text('import os, time\nos.kill(os.getpid(), 2)\ntime.sleep(9)')
    done = real_stage(f'{script}.py', env={**os.environ, 'PYTHONPATH': str(tmp_path)}, timeout=8)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, '', '')
