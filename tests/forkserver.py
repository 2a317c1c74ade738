"""A process that imports what the stages import, once, and forks a child for each stage that a test starts.

    $ python tests/forkserver.py FD FOLDER MODULE ...           # FD: one end of a SOCK_SEQPACKET pair

A message is {"command", "cwd", "env"} with four descriptors: stdin, stdout, stderr and a socket, on which the
child's process id and then its wait status come back. The server runs no parallel computation: children
forked after one would hang in their own. When the other end of FD is closed, the server and its children end.
"""
import atexit
import contextlib
import gc
import glob
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
from concurrent import futures

LAZY = 'torch._dynamo', 'sentencepiece', 'tokenizers', 'pandas', 'datasets'     # what stages import late
AT_START = 'PYTHON', 'LC_', 'LANG', 'LD_', 'OMP_', 'HF_', 'TORCH', 'PJRT', 'XLA'    # read at process start


# ---- the server ----

def preload(folder, *modules):
    """Import modules and the stages in `folder`; drop the stages again: each child imports its own."""
    sys.path.insert(0, folder)
    names = [os.path.basename(path)[:-3] for path in glob.glob(f'{folder}/*.py')]
    stages = [name for name in names if not name.startswith('test_')]
    for name in [*modules, *stages]:
        with contextlib.suppress(Exception):            # the child that needs it reports the error
            importlib.import_module(name)
    for name in stages:
        sys.modules.pop(name, None)
    sys.path.remove(folder)
    gc.freeze()                                         # pages stay shared with the children


def serve(control):
    """Fork for each message. Returns the message in the child, and None in the server at the end."""
    children = {}                                       # pidfd -> process id, socket for its status
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj in children:
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    report(*children.pop(key.fd))
                    continue
                text, descriptors, *_ = socket.recv_fds(control, 1 << 20, 4)
                if not text:
                    for pid, _ in children.values():
                        os.killpg(pid, signal.SIGKILL)
                    return None
                pid = os.fork()
                if not pid:
                    take_over(descriptors)
                    return json.loads(text)
                reply = socket.socket(fileno=descriptors.pop())
                reply.send(str(pid).encode())
                for descriptor in descriptors:
                    os.close(descriptor)
                pidfd = os.pidfd_open(pid)
                selector.register(pidfd, selectors.EVENT_READ)
                children[pidfd] = pid, reply


def report(pid, reply):
    """Send the wait status of a child that ended."""
    status = os.waitpid(pid, 0)[1]
    with reply, contextlib.suppress(OSError):
        reply.send(str(status).encode())


def take_over(descriptors):
    """In the child: take its three streams, close all else, start a session that can be killed as one."""
    os.setsid()
    for target, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, target)
    os.closerange(3, os.sysconf('SC_OPEN_MAX'))


def become(command, cwd, env):
    """Run `command` as a fresh interpreter would: its file is __main__ and its folder first on the path."""
    for place in filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep)):
        sys.path.remove(place)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    path = os.path.join(cwd, command[0])
    sys.path[:1] = [os.path.dirname(path), *filter(None, env.get('PYTHONPATH', '').split(os.pathsep))]
    sys.argv[:] = command
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    main.__file__ = path
    with open(path, 'rb') as file:
        code = compile(file.read(), path, 'exec')
    exec(code, main.__dict__)


def end(status):
    """End like the interpreter, but without freeing every object, which takes longer than most stages."""
    threading._shutdown()                               # waits for non-daemon threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# ---- the tests' side ----

class Server:
    """The server process of these tests; `start` asks it for a child."""

    def __init__(self, folder, modules=LAZY):
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.env = dict(os.environ)
        one_thread = {'JE_ARROW_MALLOC_CONF': 'background_thread:false'}        # for pyarrow after a fork
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), folder, *modules], pass_fds=[theirs.fileno()],
            cwd=folder, env={**self.env, **one_thread}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True)
        theirs.close()

    def can(self, env):
        """Whether a forked child behaves as a fresh process with `env` would."""
        def at_start(env):
            return {key: env[key] for key in env if key.startswith(AT_START) and key != 'PYTHONPATH'}
        return at_start(env) == at_start(self.env)

    def start(self, command, cwd, env):
        return Child(self, {'command': command, 'cwd': cwd, 'env': env})

    def close(self):
        self.control.close()
        self.process.communicate()


class Child:
    """What tests use of subprocess.Popen, for a child of the server."""

    def __init__(self, server, message):
        (read_out, out), (read_err, err) = os.pipe(), os.pipe()
        self.reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(server.control, [json.dumps(message).encode()], [0, out, err, theirs.fileno()])
        os.close(out)
        os.close(err)
        self.args, self.returncode = message['command'], None
        self.stdout, self.stderr = os.fdopen(read_out), os.fdopen(read_err)
        self.texts = []                                 # two futures, from the first communicate() on
        pid = self.reply.recv(64)
        assert pid, ('the fork server is gone', server.process.communicate())
        self.pid = int(pid)

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            self.reply.settimeout(timeout)
            try:
                status = int(self.reply.recv(64) or signal.SIGKILL)         # nothing: the server has ended
                self.returncode = os.waitstatus_to_exitcode(status)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(self.args, timeout) from None
            self.reply.close()
        return self.returncode

    def communicate(self, timeout=None):
        if not self.texts:
            pool = futures.ThreadPoolExecutor(2)
            self.texts = [pool.submit(file.read) for file in (self.stdout, self.stderr)]
            pool.shutdown(wait=False)
        if futures.wait(self.texts, timeout).not_done:
            raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(timeout)
        return [text.result() for text in self.texts]

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


if __name__ == '__main__':
    preload(*sys.argv[2:])
    message = serve(socket.socket(fileno=int(sys.argv[1])))
    if message:
        try:
            become(**message)
        except SystemExit as error:                     # other exceptions go to the interpreter
            if type(error.code) is not int:
                raise
            end(error.code)
        end(0)
