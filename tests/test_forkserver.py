"""A child of the fork server is like a process of its own."""
import os
import signal

import forkserver
import pytest
from conftest import launch, real_launch, real_stage, stage

SCRIPTS = {
    'name': 'import os, sys; print(__name__, __file__, sys.argv, sys.path[:3], os.getcwd())',
    'streams': 'import sys; print([(s.encoding, s.errors, s.line_buffering, s.isatty()) for s in '
               '(sys.stdin, sys.stdout, sys.stderr)], repr(sys.stdin.read()))',
    'descriptors': 'import os; print(sorted(os.listdir("/proc/self/fd")))',
    'environment': 'import os; print(sorted(os.environ.items()))',
    'signals': 'import signal; print([(n, str(signal.getsignal(n))[:25]) for n in signal.valid_signals()])',
    'modules': 'import sys; print({"train", "model", "configurator"} & set(sys.modules))',
    'status': 'import sys; print("out"); sys.exit(7)',
    'message': 'import sys; sys.exit("a message")',
    'exception': '1 / 0',
    'interrupt': 'raise KeyboardInterrupt',
    'terminated': 'import os, signal; print("out", flush=True); os.kill(os.getpid(), signal.SIGTERM)',
    'atexit': 'import atexit; atexit.register(print, "at the end")',
    'thread': 'import threading; threading.Timer(0.1, print, ["late"]).start()',
    'pool': 'import multiprocessing\nprint(multiprocessing.get_context("fork").Pool(2).map(abs, [-1, -2]))',
}


@pytest.mark.parametrize('name', SCRIPTS)
def test_a_child_is_like_a_process(name, tmp_path):
    path = tmp_path / 'script.py'
    path.write_text(SCRIPTS[name])
    env = {**os.environ, 'PYTHONPATH': f'{tmp_path}/more', 'MORE': '1'}
    ours, real = (run(str(path), '--x=1', cwd=tmp_path, env=env) for run in (stage, real_stage))
    assert (ours.returncode, ours.stdout) == (real.returncode, real.stdout)
    assert ours.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_a_hung_child_says_where_and_is_killed_with_its_own(tmp_path):
    """Its own child has the same stdout, so the text is whole only when both are gone."""
    (tmp_path / 'hangs.py').write_text('import subprocess, time\n'
                                       'subprocess.Popen(["sleep", "1000"])\n'
                                       'time.sleep(1000)\n')
    with pytest.raises(AssertionError, match='hung for 1 s.*hangs.py", line 3'):
        stage(str(tmp_path / 'hangs.py'), timeout=1)


def test_nothing_is_left_of_a_closed_server(tmp_path):
    (tmp_path / 'waits.py').write_text('import time; print("here", flush=True); time.sleep(1000)')
    (tmp_path / 'stages').mkdir()
    server = forkserver.Server(str(tmp_path / 'stages'), modules=())
    child = server.start([str(tmp_path / 'waits.py')], str(tmp_path), dict(os.environ))
    assert child.stdout.readline() == 'here\n' and child.poll() is None
    server.close()
    assert server.process.returncode == 0
    assert child.communicate(timeout=10) == ['', ''] and child.returncode == -signal.SIGKILL


def test_what_matters_at_the_start_gets_a_process(tmp_path):
    for start in (launch('-c', 'pass'), launch('script.py', env={**os.environ, 'LC_ALL': 'C'})):
        assert type(start) is type(real_launch('-c', 'pass'))
        start.communicate()
