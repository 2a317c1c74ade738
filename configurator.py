"""Knobs: defaults in a script, overridden by config files and --key=value; the rightmost argument wins.

    $ python train.py config/base_pairwise.py --batch_size=16 --attention=shared

A knob is a lower-case global of a stage script (such as train.py) whose type is in KINDS when the script
calls `configure(globals())`; its comment is its help text. A config file is Python that assigns knobs.
"""
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
import traceback

ROOT = os.path.dirname(os.path.abspath(__file__))
KINDS = {bool: 'true or false', int: 'a whole number', float: 'a finite number', str: 'a str',
         tuple: 'whole numbers with commas between them'}
if os.path.dirname(os.path.abspath(getattr(sys.modules['__main__'], '__file__', '/'))) == ROOT:
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # no traceback on Ctrl-C during imports


class UserError(ValueError):
    """A user's mistake; the one-line message says what was given and what is allowed.  No traceback."""


def run(main):
    """Call a stage's main(); a UserError or OSError becomes one line on stderr and exit status 2."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = sys.stdout or open(os.devnull, 'w')    # noqa: SIM115, None after `>&-`
    sys.stdout.reconfigure(errors='backslashreplace')   # for characters that the locale lacks
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:                             # the reader has closed the pipe, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (UserError, OSError) as error:
        rank, file = os.environ.get('LOCAL_RANK', '0'), getattr(error, 'filename', None)
        if rank != '0':                                 # rank 0 prints the error for all and exits;
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)                               # torchrun then ends this rank before it prints
        source = 'error' if rank == '0' else f'error on local rank {rank}'
        line = f'{source}: {file}: {error.strerror}' if file else f'{source}: {error}'
        write_line(line)
        tell_torchrun(line)
        sys.exit(2)
    except KeyboardInterrupt:
        say('interrupted')                              # over a progress bar
        sys.exit(128 + signal.SIGINT)


def tell_torchrun(line):
    """Write the line where torchrun reads the error for its summary, in place of a traceback."""
    with contextlib.suppress(KeyError, OSError), open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:
        details = {'py_callstack': line, 'timestamp': str(int(time.time()))}
        json.dump({'message': {'message': line, 'extraInfo': details}}, file)


def say(message):
    """Print a notice on stderr, only in the first process of each machine."""
    if os.environ.get('LOCAL_RANK', '0') == '0':
        write_line(message)


def write_line(message):
    """Print one line on stderr, over any progress bar; a closed stderr is no error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):      # AttributeError: stderr is None
        bar = '\r\033[K' if sys.stderr.isatty() else ''
        print(bar + ' '.join(str(message).split()), file=sys.stderr, flush=True)


def configure(scope, argv=None):
    """Override the knobs in `scope`, a stage script's globals().  Raises UserError; exits on --help.

    Returns ({name: value} of every knob, {name: file or 'command line'} of those that were set).
    """
    config = {name: value for name, value in scope.items()
              if name.islower() and not name.startswith('_') and type(value) in KINDS}
    origins, arguments = {}, sys.argv[1:] if argv is None else argv
    if '--help' in arguments or '-h' in arguments:
        print(help_text(scope, config))
        sys.exit(0)
    for name, value, origin in settings(arguments, config):
        if name not in config:
            near = difflib.get_close_matches(name, config, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else 'see --help'
            raise UserError(f"{origin}: no such key '{name}', {hint}")
        config[name], origins[name] = parse(name, value, scope[name], origin), origin
    scope.update(config)
    return config, origins


def settings(arguments, config):
    """(name, text or value, origin) of each setting on the command line and in the config files it names."""
    for argument in arguments:
        name, equals, text = argument.removeprefix('--').partition('=')
        if not argument.startswith('-'):
            yield from read_config_file(argument)
        elif equals or config.get(name) is False:           # --report is --report=true
            yield name, text if equals else 'true', 'command line'
        else:
            raise UserError(f'command line: {argument} needs a value: {argument}=VALUE')


def parse(name, value, default, origin='command line'):
    """`value` in the type of `default`: text from the command line is parsed, int becomes float."""
    kind = type(default)
    with contextlib.suppress(KeyError, ValueError):         # the error is raised below
        if origin == 'command line' and kind is tuple:
            value = [int(item) for item in value.split(',') if item.strip()]
        elif origin == 'command line':
            value = {'true': True, 'false': False}[value.lower()] if kind is bool else kind(value)
    if kind is tuple and type(value) in (tuple, list) and all(type(item) is int for item in value):
        return tuple(value)
    if kind is float and type(value) in (int, float) and (math.isfinite(value) or value == default):
        return float(value)                                 # infinite only if the default is
    if kind in (bool, int, str) and type(value) is kind:
        return value
    raise UserError(f'{origin}: {name}={value!r}: must be {KINDS[kind]}')


def check_limits(config, limits):
    """Raise UserError for a knob outside its limits, {knob: (minimum, maximum or None)}."""
    for key, (low, high) in limits.items():
        if config[key] < low or (high is not None and config[key] > high):
            rest = '' if high is None else f' and at most {high}'
            raise UserError(f'{key}={config[key]}: must be at least {low}{rest}')


def read_config_file(given):
    """Run a config file, from the given path or else from ROOT; yields (name, value, origin) of each knob."""
    path = given if os.path.isfile(given) else os.path.join(ROOT, given)
    if not os.path.isfile(path):
        raise UserError(f'{given}: no such config file')
    for module in [module for module in sys.modules if module.startswith('config.')]:
        del sys.modules[module]                             # so that the list below is what this file imports
    try:
        namespace = runpy.run_path(path)
    except (Exception, SystemExit) as error:                # a config file may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = '' if isinstance(error, SyntaxError) else f' ({os.path.relpath(last.filename)}:{last.lineno})'
        raise UserError(f'{given}: {type(error).__name__}: {error}{line}') from None
    imported = [module for key, module in sys.modules.items() if key.startswith('config.')]  # innermost first
    for name, value in namespace.items():
        if not name.startswith('_') and not hasattr(value, '__name__'):     # skip modules, functions
            sources = [module.__file__ for module in imported if vars(module).get(name) is value]
            yield name, value, os.path.relpath(sources[0], ROOT) if sources else given


def show(value):
    """A value as written on the command line."""
    text = ','.join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text.lower() if isinstance(value, bool) else text


def help_text(scope, config):
    """Every knob with its default and its comment, then the config files."""
    with open(scope['__file__'], encoding='utf-8') as file:
        comments = dict(re.findall(r'^(\w+) = .*# (.*)$', file.read(), re.M)[::-1])
    files = [f'  config/{name}' for name in sorted(os.listdir(os.path.join(ROOT, 'config'))) if '.py' in name]
    usage = f"usage: python {os.path.basename(scope['__file__'])} [config/FILE.py ...] [--key=value ...]"
    summary = (scope.get('__doc__') or '').strip().partition('\n')[0]
    return '\n'.join([usage, '', summary, '', table(config, comments), '', 'config files:', *files])


def table(config, notes):
    """One line for each knob: name, value and its entry in `notes` (its comment, or where it was set)."""
    lines = (f'  --{name}={show(value)}  '.ljust(40) + notes.get(name, '') for name, value in config.items())
    return '\n'.join(line.rstrip() for line in lines)
