"""Draw each attention of model.py as an SVG for slides, and the first eight in one for README.

    $ python results/attentions.py                  writes results/attentions/*.svg

To draw your own, add a row to DIAGRAMS. A slide is 960 wide and 540 high, and each function returns a piece.
"""
import re
from pathlib import Path
from statistics import median

GREY, ORANGE, BLUE = '#707070', '#f2a03a', '#8ccaf2'            # ordinary, shared, the same for all heads
LETTERS = {GREY: GREY, ORANGE: '#a85a00', BLUE: '#1a6496'}
EDGE, Q, K, V, U = 470, 190, 280, 400, 474      # where q, k and v are ready; their heights; x is at that of k
ROW = {'q': Q, 'k': K, 'v': V}
SVG = ('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" font-family="DejaVu Sans, Verdana, '
       'sans-serif" fill="#202020"><rect width="{0}" height="{1}" fill="white"/>{2}</svg>\n')


def text(x, y, words, size=36, anchor='middle', style='font-style="italic"'):
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" {style}>{words}</text>'


def box(x, y, words, width=110, height=60, fill='white', size=36, kind=''):
    """A box around (x, y). kind: stack, round or dashed. `d_q` is d with the index q."""
    look = f'width="{width}" height="{height}" fill="{fill}" stroke="#202020" stroke-width="3" '
    look += 'rx="3"' if kind in ('', 'stack') else 'rx="16"'
    look += ' stroke-dasharray="9 6"' if kind == 'dashed' else ''
    parts = [f'<rect x="{x - width / 2 + shift}" y="{y - height / 2 - shift}" {look}/>'
             for shift in ((12, 6, 0) if 'stack' in kind else (0,))]
    for i, line in enumerate(words.split('\n')):
        line = re.sub('_(.)(.*)', r'<tspan dy="8" font-size="70%">\1</tspan><tspan dy="-8">\2</tspan>', line)
        parts.append(text(x, y + size * (0.36 + 1.1 * i - 0.55 * words.count('\n')), line, size, style=''))
    return ''.join(parts)


def arrow(*points, colour=GREY, label=''):
    """An arrow through x, y, x, y ..., with a label above its end."""
    *_, before_x, before_y, x, y = points
    turn = 0 if x > before_x else 90 if y > before_y else -90
    line = ' '.join(map(str, (*points[:-2], x - 10 * (x > before_x), y)))
    width = 3 if colour == GREY else 6
    return (f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
            f'<path d="M0 0l-20-10v20z" fill="{colour}" transform="translate({x} {y}) rotate({turn})"/>'
            + text(x - 16, y - 14, label, anchor='end'))


def from_x(y, end=135, label=''):
    """x, and an arrow from it to the height y."""
    return text(50, K + 11, 'x') + arrow(70, K, 100, K, 100, y, end, y, label=label)


def own(matrix, row, width=110):
    """A matrix of this row alone."""
    y = ROW[row]
    return (from_x(y) + box(135 + width / 2, y, matrix, width, size=36 if width > 60 else 30)
            + arrow(135 + width, y, EDGE, y, label=row))


def shared(matrix, **rows):
    """A matrix of several rows; row='words' puts a box of learned numbers into the row."""
    y = median(ROW[row] for row in rows)
    parts = [from_x(y), box(190, y, matrix, fill=ORANGE)]
    for row, words in rows.items():
        parts.append(arrow(245, y, 268, y, 268, ROW[row], EDGE, ROW[row], colour=ORANGE, label=row))
        if words:
            kind = 'round stack' if words == 'S' else 'round'
            parts.append(box(345, ROW[row], words, 84, 74, size=28 if '\n' in words else 36, kind=kind))
    return ''.join(parts)


def distances(*ends, colour=GREY, kind='round stack'):
    """R, vectors of distances or of parts, and arrows to (x, y) with a bend."""
    arrows = [arrow(80, 464, bend, 464, bend, y, x, y, colour=colour) for bend, x, y in ends]
    return ''.join(arrows) + box(50, 464, 'R', 60, fill='white' if colour == GREY else colour, kind=kind)


def scores(words, fill='white', above='position'):
    """The box of A, one for each head unless it is blue. What is `above` enters it."""
    size = 33 if words.count('\n') > 2 else 36
    parts = box(625, 220, words, 310, 170, fill, size, 'stack' if fill == 'white' else '')
    if above:
        parts += box(630, 58, above, 52 + 17 * len(above), 52, kind='dashed') + arrow(630, 84, 630, 126)
    return parts + arrow(600, 305, 600, 360, colour=BLUE if fill == BLUE else GREY) + text(632, 344, 'A')


def product(words='A v', below=''):
    """A times v, then Wo."""
    parts = box(600, 485, below, 64, 36, size=30, kind='dashed') + arrow(600, 467, 600, 442) if below else ''
    parts += box(600, V, words, 260, 80, size=30 if '\n' in words else 36) + arrow(730, V, 770, V)
    return parts + box(815, V, 'Wo', 90) + arrow(860, V, 905, V) + text(928, V + 11, 'y')


# ---- name -> parameters, notes, what makes q, k and v of x, what makes y of these ----

QKV = own('Wq', 'q') + own('Wk', 'k') + own('Wv', 'v')
NO_WK = own('Wq', 'q') + from_x(K, EDGE, 'k = x') + own('Wv', 'v')
USUAL = scores('q kᵀ\nsoftmax') + product()
PARTS = product('(A * N) v', 'N')
SIGMOID, BIASED = 'q kᵀ\nsigmoid\n/ L2 norm', 'q kᵀ\n+ (q Rᵀ) N\nsigmoid\n/ L2 norm'
TO_SCORES, TO_K, TO_V = (300, EDGE, K + 22), (118, 135, K + 22), (118, 135, V + 22)
N, NONE, ALL = {GREY: 'N: distances of each head'}, {GREY: 'nothing is shared'}, {BLUE: 'one A for all heads'}
DIAGRAMS = {
    'original': ('4 (D² + D)', NONE, QKV, USUAL),
    'symmetric': ('3 (D² + D)', {ORANGE: 'Wq for q, k'}, shared('Wq', q='', k='') + own('Wv', 'v'), USUAL),
    'pairwise': ('3 (D² + D) + H K²', {ORANGE: 'Wq for q, k', GREY: 'S: a K × K matrix for each head'},
                 shared('Wq', q='S', k='') + own('Wv', 'v'), USUAL),
    'phase': ('3 (D² + D) + D / 2', {ORANGE: 'Wq for q, k', GREY: 'a: learned angles by which q turns'},
              shared('Wq', q='a', k='') + own('Wv', 'v'), USUAL),
    'identity_query': ('3 (D² + D)', {GREY: 'nothing is shared; q has no matrix'},
                       from_x(Q, EDGE, 'q = x') + own('Wk', 'k') + own('Wv', 'v'), USUAL),
    'narrow': ('3 (D² + D)', {GREY: 'nothing is shared; q and k are K / 2 wide'},
               own('Wq', 'q', 55) + own('Wk', 'k', 55) + own('Wv', 'v'), USUAL),
    'shared_kv': ('3 (D² + D)', {ORANGE: 'Wk for k, v'}, own('Wq', 'q') + shared('Wk', k='', v=''), USUAL),
    'shared': ('2 (D² + D) + 3 D', {ORANGE: 'Ws for q, k, v', GREY: 'd: vectors, times x Ws'},
               shared('Ws', q='d_q', k='d_k', v='d_v'), USUAL),
    'rpe': ('4 (D² + D) + (2c − 1) D', {ORANGE: 'R for k, v', GREY: 'a vector for each distance; r = R W'},
            QKV + distances(TO_K, TO_V, colour=ORANGE, kind='round'),
            scores('q (k + r_k)ᵀ\nsoftmax', above='') + product('A (v + r_v)')),
    'part_mask': ('4 (D² + D)', N, QKV, scores('q kᵀ\nsoftmax', above='') + PARTS),
    'one_head_softmax': ('3 (D² + D)', {**ALL, **N}, NO_WK, scores('q kᵀ\nsoftmax', BLUE, '') + PARTS),
    'one_head_sigmoid': ('3 (D² + D)', {**ALL, **N}, NO_WK, scores(SIGMOID, BLUE, '') + PARTS),
    'part_bias': ('3 (D² + D) + H D', {**ALL, GREY: 'R: a vector for each head'},
                  NO_WK + distances(TO_SCORES), scores(BIASED, BLUE, 'N') + PARTS),
    'shatter': ('3 (D² + D) + H D', {ORANGE: 'R for scores, v', **ALL},
                NO_WK + distances(TO_SCORES, TO_V, colour=ORANGE),
                scores(BIASED, BLUE, 'N') + product('(A * N) v\n+ (A N) R Wv', 'N')),
    'gau': ('6 D² + D s + 4 s',
            {ORANGE: 'Wz for q, k', BLUE: 'one head', GREY: 'silu after Wz, Wv, Wu; no MLP'},
            shared('Wz', q='d_q\nb_q', k='d_k\nb_k') + own('Wv', 'v') + from_x(U) + box(190, U, 'Wu'),
            scores('q kᵀ\nnormaliser', BLUE) + product('u * (A v)')
            + arrow(245, U, 600, U, 600, V + 42) + text(454, U - 12, 'u', anchor='end')),
    'xlnet': ('5 D² + 2 D', {GREY: 'nothing is shared; sin: of i − j; u, w: vectors'}, QKV,
              box(330, 58, 'sin', 90, 52, kind='dashed') + arrow(375, 58, 415, 58) + box(470, 58, 'Wr')
              + arrow(525, 58, 630, 58, 630, 126) + text(580, 44, 'r')
              + scores('(q + u) kᵀ\n+ (q + w) rᵀ\nsoftmax', above='') + product()),
}

if __name__ == '__main__':
    folder = Path(__file__).with_name('attentions')
    panels = []
    for i, (name, (parameters, notes, left, right)) in enumerate(DIAGRAMS.items()):
        left += text(30, 58, name, 46, 'start', 'font-weight="bold" font-family="monospace"')
        left += text(30, 106, parameters, 34, 'start', '')
        panels.append(f'<g transform="translate({i % 4 * 530} {i // 4 * 460})">{left}</g>')
        words = '&#160;&#160;'.join(f'<tspan fill="{LETTERS[c]}">{note}</tspan>' for c, note in notes.items())
        slide = SVG.format(960, 540, left + right + text(30, 531, words, 27, 'start', ''))
        (folder / f'{name}.svg').write_text(slide, encoding='utf-8')
    foot = text(1060, 965, 'orange: shared.  Then, in each: A = softmax(q kᵀ), y = A v Wo', 44, style='')
    (folder / 'overview.svg').write_text(SVG.format(2120, 990, ''.join(panels[:8]) + foot), 'utf-8')
