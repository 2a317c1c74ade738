"""Knobs: lower-case globals of a stage file, overridden by config files and --key=value, left to right.

    $ python train.py config/base_pairwise.py --batch_size=16 --attention=shared

A config file is Python that assigns knobs. --help prints every knob with its default and its comment.
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
KNOB_TYPES = {bool: 'true or false', int: 'a whole number', float: 'a number', str: 'a text',
         tuple: 'whole numbers with commas between them'}       # types of knobs


class UserError(ValueError):
    """A user's mistake, told in one line that says what was given and what is allowed."""


def shown(value):
    """Text from a file or a command line, as messages print it: no control characters, at most 200 long."""
    text = value if isinstance(value, str) else repr(value)
    text = ''.join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return text if len(text) <= 200 else text[:197] + '...'


def choose(key, name, table):
    """table[name]; raises a UserError that lists the keys if there is no such key."""
    if name not in table:
        raise UserError(f'{key}={shown(repr(name))}: choose one of {", ".join(table)}')
    return table[name]


def run(main):
    """Call a stage's main(); a mistake, a file or a package that is missing: one line and exit status 2."""
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:                     # the reader has closed the pipe, as `| head` does
        os._exit(128 + signal.SIGPIPE)          # a normal exit would write to it again
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError, ImportError) as error:
        line = 'error: ' + ' '.join(str(error).split())
        print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(KeyError), open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:
            details = {'py_callstack': line, 'timestamp': str(int(time.time()))}
            json.dump({'message': {'message': line, 'extraInfo': details}}, file)    # torchrun's summary
        sys.exit(2)


def say(message):
    """Print a notice on stderr, once on each machine."""
    if os.environ.get('LOCAL_RANK', '0') == '0':
        over_bar = '\r\033[K' * sys.stderr.isatty()         # clears the line of a progress bar
        print(over_bar + message, file=sys.stderr, flush=True)


def configure(scope, minimum, arguments=None):
    """Override the knobs in `scope`, the globals() of a stage; returns {name: value} of all of them.

    minimum  {knob: its least value}; of a number that is not there: 0
    """
    config = {name: value for name, value in scope.items()
              if name.islower() and name[0] != '_' and type(value) in KNOB_TYPES}
    arguments = sys.argv[1:] if arguments is None else arguments
    if '--help' in arguments:
        print(help_text(scope))
        sys.exit()
    for argument in arguments:
        for name, value in settings(argument, config).items():
            if name not in config:
                near = difflib.get_close_matches(name, config, n=1)
                hint = f'did you mean {near[0]}?' if near else 'see --help'
                raise UserError(f'{shown(argument)}: no knob {shown(name)}, {hint}')
            config[name] = checked(argument, name, value, scope[name], minimum.get(name, 0))
    scope.update(config)
    return config


def settings(argument, config):
    """{name: value} that one argument sets: --key=value, or a config file, also looked for in ROOT."""
    name, equals, text = argument.removeprefix('--').partition('=')
    if argument.startswith('--') and equals:
        return {name: text if isinstance(config.get(name), str) else literal(text)}
    path = argument if os.path.isfile(argument) else os.path.join(ROOT, argument)
    if not os.path.isfile(path):
        raise UserError(f'{shown(argument)}: neither a config file nor --key=value; see --help')
    try:
        found = runpy.run_path(path)
    except Exception as error:                  # a config file may raise any
        raise UserError(shown(f'{argument}: {type(error).__name__}: {error}')) from None
    return {name: value for name, value in found.items()
            if name[0] != '_' and not hasattr(value, '__name__')}       # modules and functions have one


def literal(text):
    """'3e-4' -> 0.0003, '1,2' -> (1, 2), 'true' -> True; other text as it is."""
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ('true', 'false') else text)
    except (ValueError, SyntaxError):
        return text


def checked(argument, name, value, default, least):
    """The value in the type of the default; a number must be finite and at least `least`."""
    given, kind = shown(f'{argument}: {name}={value!r}'), type(default)
    if type(value) is int and kind in (float, tuple):
        value = float(value) if kind is float else (value,)
    if type(value) is not kind:
        raise UserError(f'{given} must be {KNOB_TYPES[kind]}')
    if kind in (int, float) and not (math.isfinite(value) and value >= least):
        limit = 'finite' if least == -math.inf else f'finite and at least {least}'
        raise UserError(f'{given} must be {limit}')
    return value


def help_text(scope):
    """How to call a stage, then its knobs: the lines of its file, with their defaults and comments."""
    with open(scope['__file__'], encoding='utf-8') as file:
        knobs = re.findall(r'^[a-z]\w* = .*', file.read(), re.M)
    usage = f"python {os.path.basename(scope['__file__'])} [config/FILE.py ...] [--key=value ...]"
    return '\n'.join([usage, '', scope['__doc__'].partition('\n')[0], '', *knobs])
