"""results/attentions.py: its description is that of model.py, its picture that of the description."""
import itertools
import re
import sys

import pytest
import torch

import model
from model import ALLOWED_POSITIONS, ATTENTION, Context, EncoderConfig, NoPosition

SIZES = {'D': 24, 'H': 4, 'K': 6, 's': 5, 'c': 7, 'M': 10}      # M: block_size
SETTINGS = {'gau': {'key_size': SIZES['s']}, 'rpe': {'clip_distance': SIZES['c']}}


@pytest.fixture
def attentions(script):
    return script('attentions')


def both(attentions, name):
    """The diagram of an attention, and its module of a small model."""
    assert name in attentions.DIAGRAMS, f'{name}: needs a row in DIAGRAMS of results/attentions.py'
    config = EncoderConfig(vocab_size=40, block_size=SIZES['M'], n_layer=2, n_head=SIZES['H'],
                           n_embd=SIZES['D'], attention=name, position='none', **SETTINGS.get(name, {}))
    return attentions.DIAGRAMS[name], ATTENTION[name](config, 0)


def value(formula):
    """Of a formula such as '2 (D² + D) + H K²', where a space is a product."""
    product = re.sub(r'(?<=[\w²)]) (?=[\w(])', ' * ', formula)
    return eval(product.replace('²', ' ** 2'), {}, SIZES)


def shapes(boxes):
    return {name: tuple(value(size) for size in shape.split(', '))
            for box in boxes.values() for name, shape in box.items()}


def real_shapes(named_tensors):
    return {name: tuple(tensor.shape) for name, tensor in named_tensors}


def test_the_order_is_that_of_the_table(attentions):
    assert list(attentions.DIAGRAMS) == list(ATTENTION), 'DIAGRAMS of results/attentions.py: as in ATTENTION'


@pytest.mark.parametrize('name', ATTENTION)
def test_boxes_are_the_parameters(attentions, name):
    diagram, module = both(attentions, name)
    assert shapes(diagram.boxes) == real_shapes(module.named_parameters())
    assert value(diagram.count) == model.count_parameters(module)


@pytest.mark.parametrize('name', ATTENTION)
def test_paths_go_through_the_boxes(attentions, name):
    diagram, module = both(attentions, name)
    labels = {label for path in diagram.paths for label in path.split()[:-1]}
    ends = {path.split()[-1] for path in diagram.paths}
    assert labels - {'x', *attentions.FIXED} == set(diagram.boxes) - {'Wo'}         # Wo comes after all
    assert ends <= {*attentions.LANE, *attentions.PORT}

    fixed = {label: attentions.FIXED[label] for label in labels & set(attentions.FIXED)}
    assert shapes(fixed) == real_shapes(module.named_buffers())
    assert ('position' in fixed) == (ALLOWED_POSITIONS.get(name) != ('none',))


@pytest.mark.parametrize('name', ATTENTION)
def test_q_k_v_and_scores_are_of_the_boxes_that_lead_to_them(attentions, name, monkeypatch):
    """By autograd: which parameters is what is attended with made of?"""
    diagram, module = both(attentions, name)
    found = {}                              # ends of paths -> a tensor

    def fused_attention(q, k, v, *rest):
        found.update({'q': q, 'k': k, 'v': v})
        return q

    def attend_distances(q, k, v, k_rel, v_rel, *rest):
        found.update({'q': q, 'k': k.sum() + k_rel.sum(), 'v': v.sum() + v_rel.sum()})
        return q

    def attend_parts(a, v, N):
        found['q k scores'] = a
        return model.merge_heads(v)

    def normaliser(scores, *rest):
        found['q k'] = scores
        return scores

    for function in (fused_attention, attend_distances, attend_parts):
        monkeypatch.setattr(model, function.__name__, function)
    if name == 'gau':
        module.normaliser = normaliser
    x = torch.randn(1, SIZES['M'], SIZES['D'])
    module(x, x, Context(NoPosition(None)))

    assert found
    parameters = dict(module.named_parameters())
    for ends, tensor in found.items():
        gradients = torch.autograd.grad(tensor.sum(), parameters.values(), retain_graph=True,
                                        allow_unused=True)
        used = {key for key, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
        labels = {label for label, box in diagram.boxes.items() if used & set(box)}
        paths = [path.split() for path in diagram.paths]
        expected = {label for *through, end in paths if end in ends.split() for label in through}
        assert labels == expected & set(diagram.boxes)


def test_no_text_overlaps(attentions):
    """A text is in a box or beside it, and apart from other texts."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patches import FancyBboxPatch
    figure = attentions.drawing()
    FigureCanvasAgg(figure)                         # which knows the sizes of texts
    for axis in figure.axes:
        texts = [text for text in axis.texts if text.get_text()]
        places = {text: text.get_window_extent() for text in texts}
        for one, other in itertools.combinations(texts, 2):
            assert not places[one].overlaps(places[other]), (one, other)
        panel = axis.get_window_extent()
        boxes = [patch.get_window_extent() for patch in axis.patches if isinstance(patch, FancyBboxPatch)]
        for text, place in places.items():
            for box in [panel, *boxes]:
                is_inside = box.contains(*place.min) and box.contains(*place.max)
                assert is_inside or not box.overlaps(place), text


def description(picture):
    from PIL import Image
    with Image.open(picture) as opened:
        return opened.text['Description']


def test_the_picture_is_of_this_description(attentions, tmp_path, monkeypatch):
    assert description(attentions.FIGURE) == repr(attentions.DIAGRAMS), 'run python results/attentions.py'
    monkeypatch.setattr(attentions, 'FIGURE', tmp_path / 'again.png')
    attentions.main()
    assert description(attentions.FIGURE) == repr(attentions.DIAGRAMS)


def test_without_matplotlib_it_names_it(attentions, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(SystemExit, match='pip install matplotlib'):
        attentions.main()
