"""Draws what each attention learns and shares: cd results && python attentions.py writes both pictures.

DIAGRAMS describes the attentions of model.py. Where a box stands, and what is coloured as shared, follow from
the paths. Needs matplotlib.

1. the attentions
2. what is shared
3. drawing
4. the figures
"""
import os
import re
import statistics
import sys
from itertools import pairwise
from typing import NamedTuple

import numpy as np

FIGURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'attentions.png')


# ---- 1. the attentions ----

class Diagram(NamedTuple):
    """An attention. A path is what flows through which boxes to where: 'x Wq S q' is q = x Wq S."""
    boxes: dict                     # label -> {parameter: shape}; labels of matrices begin with W
    paths: tuple                    # each from a box, x or one of FIXED to a key of LANE or PORT
    count: str                      # parameters of a layer
    scores: tuple = ('q kᵀ', 'softmax')                     # lines of text; the result is A
    output: tuple = ('A v',)        # what Wo multiplies
    heads: str = ''                 # '': scores for each head; else what is said of the only A


NAMES = {'Wq': 'query', 'Wk': 'key', 'Wv': 'value', 'Ws': 'shared', 'Wz': 'shared', 'Wu': 'gate',
         'Wr': 'distance', 'Wo': 'out'}
FIXED = {                           # not learned: label -> {buffer of a layer in model.py: shape}
    'position': {},                 # if chosen: it rotates q and k, or adds a bias to the scores
    'N': {'partition.table': 'H, 2 M - 1'},
    'sin': {'sinusoid': '2 M - 1, D'},
}


def linears(labels, rows='D', columns='D', bias=True):
    """Boxes of nn.Linears with a weight (rows, columns)."""
    boxes = {}
    for label in labels.split():
        boxes[label] = {f'{NAMES[label]}.weight': f'{rows}, {columns}'}
        if bias:
            boxes[label][f'{NAMES[label]}.bias'] = rows
    return boxes


PLAIN = 'x Wq q', 'x Wk k', 'x Wv v'
ONE_HEAD = 'x Wq q', 'x k', 'x Wv v', 'N output'            # the keys are x
CHOSEN = 'position scores'
SIGMOID = 'sigmoid', '/ L2 norm'
DIAGRAMS = {
    'original': Diagram(linears('Wq Wk Wv Wo'), (*PLAIN, CHOSEN), '4 (D² + D)'),
    'symmetric': Diagram(linears('Wq Wv Wo'), ('x Wq q', 'x Wq k', 'x Wv v', CHOSEN), '3 (D² + D)'),
    'pairwise': Diagram({**linears('Wq Wv Wo'), 'S': {'pair': 'H, K, K'}},
                        ('x Wq S q', 'x Wq k', 'x Wv v', CHOSEN), '3 (D² + D) + H K²'),
    'phase': Diagram({**linears('Wq Wv Wo'), 'a': {'angle': 'D / 2'}},
                     ('x Wq a q', 'x Wq k', 'x Wv v', CHOSEN), '3 (D² + D) + D / 2'),
    'shared_kv': Diagram(linears('Wq Wk Wo'), ('x Wq q', 'x Wk k', 'x Wk v', CHOSEN), '3 (D² + D)'),
    'shared': Diagram({**linears('Ws Wo'), 'd_q': {'query_diag': 'D'}, 'd_k': {'key_diag': 'D'},
                       'd_v': {'value_diag': 'D'}},
                      ('x Ws d_q q', 'x Ws d_k k', 'x Ws d_v v', CHOSEN), '2 (D² + D) + 3 D'),
    'rpe': Diagram({**linears('Wq Wk Wv Wo'), 'R': {'distance_vectors': '2 c - 1, D'}},
                   (*PLAIN, 'R Wk k', 'R Wv v'), '4 (D² + D) + (2 c - 1) D'),
    'part_mask': Diagram(linears('Wq Wk Wv Wo'), (*PLAIN, 'N output'), '4 (D² + D)', output=('A N v',)),
    'one_head_softmax': Diagram(linears('Wq Wv Wo'), ONE_HEAD, '3 (D² + D)', output=('A N v',),
                                heads='A for all heads'),
    'one_head_sigmoid': Diagram(linears('Wq Wv Wo'), ONE_HEAD, '3 (D² + D)', ('q kᵀ', *SIGMOID), ('A N v',),
                                'A for all heads'),
    'part_bias': Diagram({**linears('Wq Wv Wo'), 'R': {'part_embedding': 'H, D'}},
                         (*ONE_HEAD, 'R scores', 'N scores'), '3 (D² + D) + H D',
                         ('q kᵀ', '+ q Rᵀ N', *SIGMOID), ('A N v',), 'A for all heads'),
    'shatter': Diagram({**linears('Wq Wv Wo'), 'R': {'part_embedding': 'H, D'}},
                       (*ONE_HEAD, 'R scores', 'N scores', 'R Wv v'), '3 (D² + D) + H D',
                       ('q kᵀ', '+ q Rᵀ N', *SIGMOID), ('A N v', '+ a R Wv'), 'A for all heads'),
    'gau': Diagram({**linears('Wu Wv', '2 D', bias=False), **linears('Wz', 's', bias=False),
                    **linears('Wo', 'D', '2 D', bias=False),
                    'd_q,b_q': {'query_diag': 's', 'query_bias': 's'},
                    'd_k,b_k': {'key_diag': 's', 'key_bias': 's'}},
                   ('x Wz d_q,b_q q', 'x Wz d_k,b_k k', 'x Wv v', 'x Wu u', CHOSEN), '6 D² + D s + 4 s',
                   ('q kᵀ', 'normaliser'), ('u * A v',), 'one head'),
    'xlnet': Diagram({**linears('Wq Wk Wv Wr Wo', bias=False),
                      'u,w': {'content_bias': 'D', 'distance_bias': 'D'}},
                     ('x Wq u,w q', 'x Wk k', 'x Wv v', 'sin Wr r'), '5 D² + 2 D',
                     ('(q+u) kᵀ', '+(q+w) rᵀ', 'softmax')),
}


# ---- 2. what is shared ----

def ends(diagram, label):
    """Where the paths through a box end, each once, in their order."""
    return list(dict.fromkeys(path.split()[-1] for path in diagram.paths if label in path.split()))


def is_shared(diagram, label):
    """Is it learned, and does it serve several of q, k, v and the scores?"""
    return label in diagram.boxes and len(ends(diagram, label)) > 1


def is_stacked(diagram, label):
    """Is there one for each head or part, as of S and of the R of `shatter`?"""
    return any(shape.startswith('H, ') for shape in diagram.boxes.get(label, {}).values())


# ---- 3. drawing ----

WIDTH = 470                         # of a panel, in pixels, as all sizes here; y grows downwards
HEIGHT = 516
SOURCE, MATRIX, VECTOR, MIXED, OUT = 36, 114, 190, 320, 428     # x of the columns of boxes
LANE = {'r': 116, 'q': 200, 'k': 276, 'v': 382, 'u': 448}       # y of what flows from left to right
PORT = {'scores': LANE['r'], 'output': LANE['u']}               # y of what enters from above or below
LEFT, RIGHT, TOP, BOTTOM = 256, 448, 172, 314                   # of the scores
OUTPUT = 128, 66                                                # width and height
INK = '#222222'
WIRE = '#777777'
SHARED = '#F2A13A'
ONE = '#8CCBF2'


class Box(NamedTuple):
    label: str
    x: float                        # of its middle
    y: float
    width: float
    height: float


def boxes_of(diagram, path):
    """The boxes of a path, and x: each in the middle of the lanes that it serves."""
    first, *others, end = path.split()
    if first == 'x':
        yield Box(first, SOURCE, LANE['k'], 28, 28)
    elif first in FIXED and not others:
        yield Box(first, MIXED, PORT[end], 124 if first == 'position' else 58, 40)
    else:
        yield Box(first, SOURCE, LANE['r'] if end == 'r' else LANE['u'], 48, 48)
    for label in others:
        y = statistics.median(LANE[lane] for lane in ends(diagram, label))
        if label.startswith('W'):
            yield Box(label, MATRIX, y, 58, 50)
        else:
            yield Box(label, VECTOR, y, 54, 66)


def draw_box(axis, box, colour='white', dashed=False, rounded=False, stacked=False):
    from matplotlib.patches import FancyBboxPatch
    _, x, y, width, height = box
    corner = f'round,pad=0,rounding_size={14 if rounded else 3}'
    for shift in (8, 4, 0) if stacked else (0,):
        at = x - width / 2 + shift, y - height / 2 - shift
        axis.add_patch(FancyBboxPatch(at, width, height, corner, facecolor=colour, edgecolor=INK,
                                      linestyle=(0, (3, 2)) if dashed else '-', linewidth=1.6, zorder=3))
    # subscripts, and what a comma separates on lines of its own
    text = re.sub(r'_(\w)', r'$_\1$', box.label).replace(',', '\n')
    axis.text(x, y, text, fontsize=19, ha='center', va='center', color=INK, linespacing=1.1, zorder=4)


def letter(axis, x, y, text, align='center'):
    axis.text(x, y, text, fontsize=20, style='italic', ha=align, va='center', color=INK)


def arrow(axis, *points, colour=WIRE):
    """A line through points (x, y), all pieces horizontal or vertical."""
    (before_x, before_y), (x, y) = points[-2:]
    right = (x > before_x) - (x < before_x)             # the direction of the last piece
    down = (y > before_y) - (y < before_y)
    line = *points[:-1], (x - 10 * right, y - 10 * down)
    head = [(x - 17 * right + side * down, y - 17 * down + side * right) for side in (7, -7)]
    axis.plot(*zip(*line, strict=True), color=colour, linewidth=2 if colour == WIRE else 4,
              zorder=1 if colour == WIRE else 2, solid_joinstyle='miter')
    axis.fill(*zip((x, y), *head, strict=True), color=colour, linewidth=0, zorder=2)


def draw_wires(axis, diagram, path):
    boxes = list(boxes_of(diagram, path))
    end = path.split()[-1]
    learned = path.split()[0] in diagram.boxes              # R, which enters Wk and Wv below x
    colour = SHARED if is_shared(diagram, boxes[0].label) else WIRE
    for box, after in pairwise(boxes):
        right = box.x + box.width / 2
        y = after.y + 14 * learned
        arrow(axis, (right, box.y), (right + 10, box.y), (right + 10, y), (after.x - after.width / 2, y),
              colour=colour)
        if is_shared(diagram, after.label):
            colour = SHARED
        elif learned:                                       # what leaves Wk is of x too
            colour = WIRE

    last = boxes[-1]
    right = last.x + last.width / 2
    if end in 'qkv':
        y = LANE[end]
        arrow(axis, (right, last.y), (right + 10, last.y), (right + 10, y), (LEFT, y), colour=colour)
    elif end == 'scores' and last.x < MIXED:
        y = BOTTOM - 12
        arrow(axis, (right, last.y), (LEFT - 46, last.y), (LEFT - 46, y), (LEFT, y), colour=colour)
    else:
        top = TOP if diagram.heads else TOP - 8
        y = top if end in ('scores', 'r') else LANE['v'] + OUTPUT[1] / 2
        arrow(axis, (right, last.y), (MIXED, last.y), (MIXED, y), colour=colour)
    if end in LANE and not learned:
        letter(axis, LEFT - 8, LANE[end] - 21, f'{end} = x' if last.label == 'x' else end, 'right')


def draw(axis, name, diagram):
    axis.text(22, 34, name, fontsize=23, weight='bold', family='monospace', va='center', color=INK)
    axis.text(22, 68, diagram.count, fontsize=19, va='center', color=INK)
    for path in diagram.paths:
        draw_wires(axis, diagram, path)
    for box in dict.fromkeys(box for path in diagram.paths for box in boxes_of(diagram, path)):
        if box.label == 'x':
            letter(axis, box.x, box.y, box.label)
        else:
            draw_box(axis, box, SHARED if is_shared(diagram, box.label) else 'white', box.label in FIXED,
                     box.x != MATRIX, is_stacked(diagram, box.label))

    y = LANE['v']
    above = y - OUTPUT[1] / 2
    text = '\n'.join(diagram.scores)
    scores = Box(text, (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2, RIGHT - LEFT, BOTTOM - TOP)
    draw_box(axis, scores, ONE if diagram.heads else 'white', stacked=not diagram.heads)
    arrow(axis, (MIXED, BOTTOM), (MIXED, above), colour=ONE if diagram.heads else WIRE)
    letter(axis, MIXED + 24, (BOTTOM + above) / 2, 'A')
    draw_box(axis, Box('\n'.join(diagram.output), MIXED, y, *OUTPUT))
    arrow(axis, (MIXED + OUTPUT[0] / 2, y), (OUT - 25, y))
    draw_box(axis, Box('Wo', OUT, y, 50, 50))
    arrow(axis, (OUT + 25, y), (WIDTH, y))

    shared = [f"{label} for {', '.join(ends(diagram, label))}" for label in diagram.boxes
              if is_shared(diagram, label)]
    nothing = '' if diagram.heads else 'nothing shared'
    axis.text(22, HEIGHT - 24, '; '.join(shared) or nothing, fontsize=19, va='center',
              color='#A85B00' if shared else WIRE)
    axis.text(WIDTH - 22, HEIGHT - 24, diagram.heads, fontsize=19, va='center', ha='right', color='#1A6FA8')


SAMPLES = [
    ('Wq', {}, 'a learned matrix'),
    ('Wq', {'colour': SHARED}, 'shared by several of q, k, v and the scores'),
    ('q kᵀ', {'stacked': True}, 'one for each head, or each of H parts'),
    ('q kᵀ', {'colour': ONE}, 'the same scores for all heads'),
    ('position', {'dashed': True, 'rounded': True}, 'if chosen: rope turns q and k, rab adds a bias'),
    ('N', {'dashed': True, 'rounded': True}, 'not learned: splits distances j - i in H parts'),
]
SHARING = [*SAMPLES[:1], ('Wq', {'colour': SHARED}, 'shared by several of q, k and v'),
           ('q kᵀ', {'stacked': True}, 'one for each head'),
           ('S', {'rounded': True, 'stacked': True}, 'learned, K x K for each head'),
           ('a', {'rounded': True}, 'learned: angles (a), or vectors (d)'), SAMPLES[4]]


def draw_legend(axis, samples, text):
    for number, (label, style, meaning) in enumerate(samples):
        y = 46 + 62 * number
        draw_box(axis, Box(label, 96, y, 124, 46), **style)
        axis.text(188, y, meaning, fontsize=20, va='center', color=INK)
    axis.text(34, 20 + 62 * len(samples), text, fontsize=19, va='top', color=INK, linespacing=1.4)


# ---- 4. the figures ----

PICTURES = {
    'attentions.png': ('Orange projections are shared', 472,
                       ('original', 'symmetric', 'pairwise', 'phase', 'shared_kv', 'shared'), SHARING,
                       'Below a name: parameters of an attention D wide,\nwith H heads; K = D / H.', 490),
    'attentions_more.png': ('Blue scores serve all heads', 516,
                            ('rpe', 'part_mask', 'one_head_softmax', 'one_head_sigmoid', 'part_bias',
                             'shatter', 'gau', 'xlnet'), SAMPLES,
                            'Below a name: parameters of an attention D wide, with H heads;\n'
                            's = key_size, c = clip_distance. Rounded boxes are vectors.\n'
                            'R: vectors of distances (rpe) or parts;  a: A N summed over keys.\n'
                            'gau: silu after Wz, Wv and Wu;  no MLP follows.', 560),
}
TITLE = 84


def drawing(title, height, names, samples, text, legend):
    from matplotlib.figure import Figure
    global HEIGHT
    HEIGHT = height
    whole = TITLE + len(names) // 2 * height + legend
    figure = Figure((2 * WIDTH / 100, whole / 100), dpi=100)

    def panel(x, top, width, tall):
        place = x / 2 / WIDTH, 1 - (top + tall) / whole, width / 2 / WIDTH, tall / whole
        axis = figure.add_axes(place, xticks=[], yticks=[], xlim=(0, width), ylim=(tall, 0))
        axis.spines[:].set_color('#CCCCCC')
        return axis

    axis = panel(0, 0, 2 * WIDTH, TITLE)
    axis.text(22, TITLE / 2, title, fontsize=30, weight='bold', va='center', color=INK)
    for number, name in enumerate(names):
        draw(panel(number % 2 * WIDTH, TITLE + number // 2 * height, WIDTH, height), name, DIAGRAMS[name])
    draw_legend(panel(0, whole - legend, 2 * WIDTH, legend), samples, text)
    return figure


def save(figure, path):
    """As PNG of 64 colours, a third of the size, with what it was drawn from: a test compares it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image, PngImagePlugin
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    drawn_from = PngImagePlugin.PngInfo()
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert('RGB')
    picture.quantize(64).save(path, pnginfo=drawn_from, optimize=True)


def main():
    try:
        for path, parts in PICTURES.items():
            save(drawing(*parts), path)
    except ImportError:
        sys.exit('attentions.py: needs matplotlib: pip install matplotlib')


if __name__ == '__main__':
    main()
