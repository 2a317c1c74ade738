"""Knobs: lower-case globals of train.py, finetune.py, prepare_data.py and bench.py, the stage files.

    $ python train.py config/base_pairwise.py --batch_size=16 --attention=shared

Config files and --key=value override them, from left to right. A config file is Python that assigns knobs,
and all of it runs: use only files that you trust. --help prints every knob with its default and its comment.

Above the double line stands all that decides the value of a knob. Below it stand messages, which decide none.

    1  knobs      globals of a stage <- config files <- flags, each value checked
    2  messages   a mistake in one line, notices, --help
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
KNOB_TYPES = {                  # type of a knob -> what a message calls it
    bool: 'true or false', int: 'a whole number', float: 'a number', str: 'a text',
    tuple: 'whole numbers with commas between them',
}


# ---- 1. knobs ----

def configure(scope, minimum, arguments=None):
    """Override the knobs of a stage; returns {name: value} of all of them.

    scope      globals() of the stage, or a dict of knobs; the value of a knob there is its default and
               decides its type
    minimum    {knob: its least value}; knobs without an entry must be at least 0
    arguments  config files and --key=value, by default those of the command line

    The scope is changed only after all arguments are checked.
    """
    defaults = {name: value for name, value in scope.items() if is_knob(name, value)}
    if arguments is None:
        arguments = sys.argv[1:]
    if '--help' in arguments:
        print(help_text(scope))
        sys.exit()

    config = dict(defaults)
    for argument in arguments:
        for name, value in settings(argument, defaults).items():
            if name not in defaults:
                raise UserError(unknown_knob(argument, name, defaults))
            config[name] = checked(argument, name, value, defaults[name], minimum.get(name, 0))
    scope.update(config)
    return config


def is_knob(name, value):
    return name.islower() and not name.startswith('_') and type(value) in KNOB_TYPES


def settings(argument, defaults):
    """{name: value} that one argument sets: --key=value, or a config file, also looked for in ROOT."""
    if argument.startswith('--') and '=' in argument:
        name, _, text = argument.removeprefix('--').partition('=')
        # a text stays as it is: a folder may be called 2024
        value = text if isinstance(defaults.get(name), str) else literal(text)
        return {name: value}

    path = argument if os.path.isfile(argument) else os.path.join(ROOT, argument)
    if not os.path.isfile(path):
        raise UserError(f'{shown(argument)}: neither a config file nor --key=value; see --help')
    try:
        assigned = runpy.run_path(path)
    except Exception as error:                  # a config file may raise any
        raise UserError(shown(f'{argument}: {type(error).__name__}: {error}')) from None
    # Modules, functions and classes of a config file are no knobs: they have a __name__. The name of any
    # other helper variable must start with _.
    return {name: value for name, value in assigned.items()
            if not name.startswith('_') and not hasattr(value, '__name__')}


def literal(text):
    """'3e-4' -> 0.0003, '1,2' -> (1, 2), 'true' -> True; other text as it is."""
    if text.lower() in ('true', 'false'):
        text = text.capitalize()
    try:
        return ast.literal_eval(text)
    except Exception:                           # '{[]}' is a TypeError, 100,000 minus signs a MemoryError
        return text


def checked(argument, name, value, default, least):
    """The value in the type of the default; each of its numbers is finite and at least `least`.

    A tuple may be empty only if the default is.
    """
    expected = type(default)
    if expected is tuple and type(value) is int:
        value = (value,)
    # This is checked first, since the messages below have the value, and Python refuses to print an int of
    # more than 4,300 digits. No library takes ints of 2^63 or more.
    parts = value if type(value) is tuple else (value,)
    if any(type(part) is int and abs(part) >= 2 ** 63 for part in parts):
        raise UserError(f'{shown(argument)}: {shown(name)} must be below 2^63')

    given = shown(f'{argument}: {name}={value!r}')
    if expected is float and type(value) is int:
        value = float(value)
    is_expected = type(value) is expected
    if is_expected and expected is tuple:
        is_expected = all(type(part) is int for part in value)
    if not is_expected:
        raise UserError(f'{given} must be {KNOB_TYPES[expected]}')
    if value == () and default != ():
        raise UserError(f'{given} must have at least one number')

    if expected in (int, float, tuple):
        numbers = value if expected is tuple else (value,)
        limit = 'finite' if least == -math.inf else f'finite and at least {least}'
        if not all(math.isfinite(number) and number >= least for number in numbers):
            raise UserError(f'{given} must be {limit}')
    return value


def choose(key, name, table):
    """table[name]; raises a UserError that lists the keys if there is no such key.

    Some callers want the check alone and drop the result.
    """
    if name not in table:
        raise UserError(f'{key}={shown(repr(name))}: choose one of {", ".join(table)}')
    return table[name]


# ======== above: all that decides the value of a knob; below: messages and help ========

# ---- 2. messages ----

class UserError(ValueError):
    """A user's mistake, told in one line that says what was given and what is allowed."""


def unknown_knob(argument, name, defaults):
    near = difflib.get_close_matches(name, defaults, n=1)
    hint = f'did you mean {near[0]}?' if near else 'see --help'
    return f'{shown(argument)}: no knob {shown(name)}, {hint}'


def printable(text):
    """A line without control characters, so that a terminal obeys nothing in it."""
    return ''.join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def shown(value):
    """Text from a file or a command line, as messages print it: no control characters, at most 200 long."""
    text = printable(value if isinstance(value, str) else repr(value))
    return text if len(text) <= 200 else text[:197] + '...'


def say(message):
    """Print a notice on stderr, once on each machine."""
    if os.environ.get('LOCAL_RANK', '0') != '0':
        return
    over_bar = '\r\033[K' if sys.stderr.isatty() else ''        # clears the line of a progress bar
    print(over_bar + message, file=sys.stderr, flush=True)


def run(main):
    """Call a stage's main(); a mistake, a missing file or package, no memory: one line and exit status 2."""
    for name in ('stdout', 'stderr'):           # None if the shell closed it: >&- or 2>&-
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, 'w'))           # noqa: SIM115
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:                     # the reader has closed the pipe, as `| head` does
        os._exit(128 + signal.SIGPIPE)          # a normal exit would write to it again
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (UserError, OSError, ImportError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):   # PyTorch's words
            raise
        text = str(error) or type(error).__name__               # a MemoryError says nothing more
        line = 'error: ' + ' '.join(text.split())
        print(line, file=sys.stderr, flush=True)
        tell_torchrun(line)
        sys.exit(2)


def tell_torchrun(line):
    """Write the file from which torchrun takes a worker's error for its summary, if torchrun asks for one."""
    with contextlib.suppress(KeyError), open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:
        details = {'py_callstack': line, 'timestamp': str(int(time.time()))}
        json.dump({'message': {'message': line, 'extraInfo': details}}, file)


def help_text(scope):
    """How to call a stage, then its knobs: the lines of its file, with their defaults and comments."""
    with open(scope['__file__'], encoding='utf-8') as file:
        knobs = re.findall(r'^[a-z]\w* = .*', file.read(), re.M)
    usage = f"python {os.path.basename(scope['__file__'])} [config/FILE.py ...] [--key=value ...]"
    warning = 'A config file is Python, and all of it runs: use only files that you trust.'
    return '\n'.join([usage, warning, '', scope['__doc__'].partition('\n')[0], '', *knobs])
