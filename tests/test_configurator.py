"""configurator.py: knobs <- config files <- command line, and the ways to get them wrong."""
import importlib
import os
import re

import pytest
from conftest import knobs_of, refused

import configurator
import train
from configurator import UserError, configure

LEAST = {'n_layer': 1, 'null_threshold': -float('inf')}
STAGES = {name: importlib.import_module(name) for name in ('train', 'finetune', 'bench', 'prepare_data')}


def scope():
    return {'n_layer': 12, 'block_size': 0, 'learning_rate': 1e-4, 'compile': True, 'name': 'x',
            'milestones': (), 'null_threshold': 0.0, 'LIMIT': 3, '_private': 1}


@pytest.mark.parametrize('argument, value', [
    ('--n_layer=1_000', 1000),
    ('--learning_rate=1', 1.0),
    ('--compile=FALSE', False),
    ('--name=2024', '2024'), ('--name=x=y', 'x=y'), ('--name=~/x', os.path.expanduser('~/x')),
    ('--block_size=0', 0),
    ('--milestones=10,20', (10, 20)), ('--milestones=10', (10,)), ('--milestones=()', ()),
    ('--null_threshold=-1.5', -1.5),
])
def test_values_on_the_command_line(argument, value):
    names, name = scope(), argument[2:].partition('=')[0]
    config = configure(names, LEAST, [argument])
    assert config[name] == names[name] == value
    assert type(config[name]) is type(value)


def test_files_and_flags_left_to_right_last_wins(tmp_path):
    first, second = tmp_path / 'b.py', tmp_path / 'a.py'
    first.write_text('import math\ndef _half(x):\n    return x // 2\nn_layer = _half(4)\nname = "a"')
    second.write_text('n_layer = 2')
    config = configure(scope(), LEAST, ['--name=z', str(first), str(second), '--learning_rate=3'])
    assert (config['n_layer'], config['name'], config['learning_rate']) == (2, 'a', 3.0)


def test_config_files_are_found_from_any_folder(tmp_path, monkeypatch):
    """As given, then in the repository."""
    monkeypatch.chdir(tmp_path)
    def out_dir():
        return configure(dict(vars(train)), train.MINIMUM, ['config/quickstart.py'])['out_dir']
    assert out_dir() == 'out/quickstart'
    (tmp_path / 'config').mkdir()
    (tmp_path / 'config' / 'quickstart.py').write_text("out_dir = 'mine'")
    assert out_dir() == 'mine'


FILES = {
    'broken.py': 'attention = pairwise',
    'hidden.py': 'seed = max',
    'mixed.py': 'seed = 2\nmax_iters: 7',
}


@pytest.mark.parametrize('argument, reason', [
    ('--n_layr=3', "'--n_layr=3': there is no knob 'n_layr', did you mean n_layer?"),
    ('--n_layer=true', 'must be a whole number'), ('--dropout=-0.1', 'must be finite and at least 0'),
    (f'--seed={2 ** 63}', 'below 2^63'),
    ('hidden.py', 'seed=<built-in function max> must'),
    ('broken.py', "broken.py: NameError: name 'pairwise' is not defined"),
    ('mixed.py', 'mixed.py: a config file is Python')])
def test_malformed_command_lines_are_refused_in_one_line(argument, reason, stage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if argument in FILES:
        (tmp_path / argument).write_text(FILES[argument])
    assert reason in refused(stage('train', argument))


@pytest.mark.parametrize('name', STAGES)
def test_help_is_the_head_of_the_file(name, stage):
    """With every knob, its default and its comment."""
    text = stage(name, '--help').out
    assert text.startswith(f'"""{STAGES[name].__doc__}')
    knobs = knobs_of(STAGES[name])
    assert {*STAGES[name].MINIMUM} <= {*knobs}
    for knob in knobs:
        assert re.search(rf'^ *{knob}(: \w+)? = .+ # ', text, re.M), knob


@pytest.mark.parametrize('error, said', [
    (UserError('bad\nluck'), 'bad luck'), (OSError(28, 'Disk full', 'x'), "[Errno 28] Disk full: 'x'"),
    (ModuleNotFoundError('No wandb', name='wandb'), 'No wandb: pip install wandb'),
], ids=repr)
def test_a_mistake_is_one_line_and_an_error_of_the_code_keeps_its_traceback(error, said, capsys, monkeypatch):
    """Also where no console is."""
    def fail(error):
        raise error
    monkeypatch.setattr('sys.stdout', None)
    with pytest.raises(SystemExit) as end:
        configurator.run(lambda: fail(error))
    assert end.value.code == 2
    assert capsys.readouterr().err == f'error: {said}\n'
    with pytest.raises(RuntimeError):
        configurator.run(lambda: fail(RuntimeError('no user caused this')))
