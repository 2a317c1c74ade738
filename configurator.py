"""Knobs: lower-case globals of a stage file, overridden by config files and --key=value, left to right.

    $ python train.py config/base_pairwise.py --batch_size=16 --attention=shared

A config file is Python that assigns knobs.  --help prints every knob with its default and its comment.
"""
import ast
import contextlib
import difflib
import json
import math
import os
import re
import runpy
import signal
import sys
import time

ROOT = os.path.dirname(os.path.abspath(__file__))
SIZES = ('batch_size', 'block_size', 'clip_distance', 'key_size', 'log_interval', 'max_answer', 'max_iters',
         'n_embd',
         'n_head', 'n_inner', 'n_layer', 'rounds', 'stride', 'total_batch', 'trials', 'unit_bytes',
         'vocab_size')
if os.path.dirname(os.path.abspath(sys.argv[0])) == ROOT:
    signal.signal(signal.SIGINT, signal.SIG_DFL)        # no traceback on Ctrl-C while PyTorch is imported


class UserError(ValueError):
    """A user's mistake, told in one line that says what was given and what is allowed."""


def shown(value):
    """Text from a file or a command line, as messages print it: no control characters, at most 200 long."""
    text = value if isinstance(value, str) else repr(value)
    text = ''.join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return text if len(text) <= 200 else text[:197] + '...'


def run(main):
    """Call a stage's main(); a mistake, a file or a package that is missing: one line and exit status 2."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except BrokenPipeError:                     # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError, ImportError) as error:
        tell_torchrun(f'error: {error}')
        sys.exit(2)


def tell_torchrun(line):
    """Print the line, under torchrun also where its summary reads it, in place of a traceback."""
    print(line, file=sys.stderr, flush=True)
    with contextlib.suppress(KeyError), open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:
        details = {'py_callstack': line, 'timestamp': str(int(time.time()))}
        json.dump({'message': {'message': line, 'extraInfo': details}}, file)


def say(message):
    """Print a notice on stderr, once on each machine."""
    if os.environ.get('LOCAL_RANK', '0') == '0':
        print(message, file=sys.stderr, flush=True)


def configure(scope, arguments=None):
    """Override the knobs in `scope`, the globals() of a stage; returns {name: value} of all of them."""
    config = {name: value for name, value in scope.items()
              if name.islower() and name[0] != '_' and isinstance(value, (bool, int, float, str, tuple))}
    for argument in sys.argv[1:] if arguments is None else arguments:
        name, equals, text = argument.removeprefix('--').partition('=')
        if argument in ('--help', '-h'):
            print(help_text(scope))
            sys.exit()
        elif argument.startswith('--') and equals:
            settings = {name: text if isinstance(config.get(name), str) else literal(text)}
        else:
            path = argument if os.path.isfile(argument) else os.path.join(ROOT, argument)
            if not os.path.isfile(path):
                raise UserError(f'{argument}: neither a config file nor --key=value')
            settings = {name: value for name, value in runpy.run_path(path).items() if name[0] != '_'}
        for name, value in settings.items():
            if name not in config:
                near = ' or '.join(difflib.get_close_matches(name, config))
                raise UserError(f'{argument}: no knob {name}' + (f'; {near}?' if near else '; see --help'))
            config[name] = checked(argument, name, value, scope[name])
    scope.update(config)
    return config


def checked(argument, name, value, default):
    """The value in the type of the default; numbers are finite and not negative, sizes at least 1."""
    kind = type(default)
    if kind is float and type(value) is int:
        value = float(value)
    if kind is tuple and type(value) is int:
        value = value,
    if type(value) is not kind:
        raise UserError(f'{argument}: {name} must be a {kind.__name__}')
    low = 1 if name in SIZES and default else 0
    if kind in (int, float) and not low <= value < math.inf:
        raise UserError(f'{argument}: {name}={value} must be finite and at least {low}')
    return value


def literal(text):
    """'3e-4' -> 0.0003, '1,2' -> (1, 2), 'true' -> True; other text as it is."""
    try:
        return ast.literal_eval(text.capitalize() if text in ('true', 'false') else text)
    except (ValueError, SyntaxError):
        return text


def help_text(scope):
    """The knobs of a stage file: its lines `name = value   # comment`."""
    with open(scope['__file__'], encoding='utf-8') as file:
        return scope['__doc__'] + '\n' + '\n'.join(re.findall(r'^[a-z]\w* = .*', file.read(), re.M))
