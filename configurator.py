"""Knobs: the globals of a stage script <- config files <- --key=value, left to right, the last one wins.

    $ python train.py config/base_pairwise.py --batch_size=16 --attention=shared

A knob is a lower-case global of a stage script that holds a value of one of KINDS when `configure(globals())`
is called; its comment is its help text. A config file is Python, run in a namespace of its own, that assigns
knobs. Everything a user can get wrong is a `UserError`: one line, exit status 2, no traceback.
"""
import contextlib
import difflib
import math
import os
import re
import runpy
import signal
import sys
import time
import traceback
import types

ROOT = os.path.dirname(os.path.abspath(__file__))
KINDS = {bool: 'a bool is true or false', int: 'a whole number', float: 'a number', str: 'a str',
         tuple: 'whole numbers with commas between them'}
script = getattr(sys.modules['__main__'], '__file__', None)
if script and os.path.dirname(os.path.abspath(script)) == ROOT:     # a stage script imports this first,
    signal.signal(signal.SIGINT, signal.SIG_DFL)                    # so Ctrl-C in its other imports is quiet


class UserError(ValueError):
    """What a user did and what would do, in one line."""


def run(main):
    """Call a stage's main(); a UserError or OSError becomes one line on stderr and exit status 2."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = sys.stdout or open(os.devnull, 'w')    # noqa: SIM115, None after `>&-`
    sys.stdout.reconfigure(errors='backslashreplace')   # for characters that the locale lacks
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        sys.exit(complain(error))
    except BrokenPipeError:                             # nobody reads on, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        sys.exit(complain(f'{error.filename}: {error.strerror}' if error.filename else error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def complain(message):
    """Say what went wrong; returns 2, the exit status of a user's mistake."""
    rank = os.environ.get('LOCAL_RANK', '0')
    if rank != '0':                                     # torchrun ends it soon if the first one ends too
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3)                                   # so what it then still has to say is its own
    write_line(f'error: {message}' if rank == '0' else f'error on local rank {rank}: {message}')
    return 2


def say(message):
    """A notice on stderr, from the first process of each machine alone."""
    if os.environ.get('LOCAL_RANK', '0') == '0':
        write_line(message)


def write_line(message):
    """One line on stderr, in place of a progress bar; a closed stderr is no error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):      # the last one where it is None
        bar = '\r\033[K' if sys.stderr.isatty() else ''
        print(bar + ' '.join(str(message).split()), file=sys.stderr, flush=True)


def configure(scope, argv=None):
    """Override the knobs in `scope`, a stage script's globals().  Raises UserError; exits on --help.

    Returns ({name: value} of every knob, {name: file or 'command line'} of those that were set).
    """
    config = {name: value for name, value in scope.items()
              if name.islower() and not name.startswith('_') and type(value) in KINDS}
    origins, arguments = {}, list(sys.argv[1:] if argv is None else argv)
    if '--help' in arguments or '-h' in arguments:
        print(help_text(scope, config))
        sys.exit(0)
    while arguments:
        argument = arguments.pop(0)
        if argument.startswith('-'):
            name, equals, text = argument.removeprefix('--').partition('=')
            check_name(name, config, 'command line')
            if not equals and (not arguments or arguments[0].startswith('--')):
                raise UserError(f'command line: --{name} needs a value, as in --{name}={show(config[name])}')
            found = [(name, parse(name, text if equals else arguments.pop(0), scope[name]), 'command line')]
        else:
            found = read_config_file(argument, config)
        for name, value, origin in found:
            config[name], origins[name] = checked(name, value, scope[name], origin), origin
    scope.update(config)
    return config, origins


def check_name(name, config, origin):
    if name not in config:
        near = difflib.get_close_matches(name, config, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else 'see --help'
        raise UserError(f"{origin}: no such key '{name}', {hint}")


def parse(name, text, default):
    """The value of `--name=text` in the type of `default`; a str is taken as it stands."""
    kind = type(default)
    try:
        if kind is tuple:
            return tuple(int(item) for item in text.split(',') if item.strip())
        return {'true': True, 'false': False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        example = show(default) or '1000,2000'
        raise UserError(f'command line: {name}={text!r}: {KINDS[kind]}, as in --{name}={example}') from None


def checked(name, value, default, origin):
    """`value` in the type of `default`: int widens to float, a list to a tuple, a bool is never a number."""
    kind = type(default)
    if kind is tuple and isinstance(value, (tuple, list)) and all(type(item) is int for item in value):
        return tuple(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or kind is tuple:
        wanted = 'whole numbers' if kind is tuple else kind.__name__
        raise UserError(f'{origin}: {name}={value!r}: must be {wanted}, as in {name} = {default!r}')
    if kind is float and not math.isfinite(value) and value != default:       # a default may be inf
        raise UserError(f'{origin}: {name}={value}: must be finite')
    return value


def read_config_file(given, config):
    """Run a config file, as given or in the repository; yields (name, value, origin) of the knobs it sets."""
    path = given if os.path.isfile(given) else os.path.join(ROOT, given)
    if not os.path.isfile(path):
        raise UserError(f'{given}: no such config file')
    sys.path[:] = [ROOT] + [entry for entry in sys.path if entry != ROOT]       # for `from config.base ...`
    for module in [module for module in sys.modules if module.startswith('config.')]:
        del sys.modules[module]                             # what is there afterwards is what this file imports
    try:
        namespace = runpy.run_path(path, run_name='config_file')
    except BaseException as error:                          # a config file may raise anything, SystemExit too
        frames = [f'{os.path.relpath(frame.filename)}:{frame.lineno}'
                  for frame in traceback.extract_tb(error.__traceback__)
                  if frame.filename == path or os.sep + 'config' + os.sep in frame.filename]
        raise UserError(f'{[given, *frames][-1]}: {type(error).__name__}: {error}') from None
    imported = [module for name, module in reversed(sys.modules.items()) if name.startswith('config.')]
    for name, value in namespace.items():
        if not name.startswith('_') and not isinstance(value, (types.ModuleType, types.FunctionType, type)):
            origins = (os.path.relpath(module.__file__) for module in imported if vars(module).get(name) is value)
            origin = next(origins, given)                   # the innermost file with that very object
            check_name(name, config, origin)
            yield name, value, origin


def show(value):
    """A value as it is written on the command line."""
    if isinstance(value, tuple):
        return ','.join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def help_text(scope, config):
    """Every knob with its default and its comment, then the config files."""
    with open(scope['__file__'], encoding='utf-8') as file:
        comments = dict(re.findall(r'^(\w+) = .*# (.*)$', file.read(), re.M)[::-1])
    knobs = [f'  --{name}={show(value)}'.ljust(36) + comments.get(name, '') for name, value in config.items()]
    names = [f'  config/{name}' for name in sorted(os.listdir(os.path.join(ROOT, 'config')))
             if name.endswith('.py')]
    usage = f"usage: python {os.path.basename(scope['__file__'])} [config/FILE.py ...] [--key=value ...]"
    summary = (scope.get('__doc__') or '').strip().partition('\n')[0]
    return '\n'.join([usage, '', summary, '', 'knobs:', *knobs, '', 'config files:', *names])


def table(config, origins):
    """The resolved knobs, one a line, with the origin of those that were set."""
    lines = (f"  {name} = {show(value)}".ljust(40) + (f'<- {origins[name]}' if name in origins else '')
             for name, value in config.items())
    return '\n'.join(line.rstrip() for line in lines)
