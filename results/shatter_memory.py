"""Memory and time of a layer of Shatter's steps, with and without recompute.

    $ PYTHONPATH=. python results/shatter_memory.py

Memory: storages that autograd keeps for the backward pass, without the layer's own parameters. Time: forward
and backward, interleaved, median of seven ratios.
"""
import json
import statistics
import time

import torch

from model import SHATTER, Context, EncoderConfig, NoPosition

BATCH, WIDTH = 8, 768


def kept(layer, x, context):
    """MiB that the backward pass of a layer holds."""
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x, x, context)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    return sum(size for pointer, size in sizes.items() if pointer not in own) / 2 ** 20


def seconds(layer, x, context):
    start = time.perf_counter()
    layer(x, x, context).sum().backward()
    return time.perf_counter() - start


torch.set_num_threads(1)
for length in (128, 256, 512):
    for name in ('part_mask', 'one_head_sigmoid', 'shatter'):
        layers = [SHATTER[name](EncoderConfig(100, length, attention=name, position='none',
                                              recompute=recompute), 0).eval()
                  for recompute in (False, True)]
        x, context = torch.randn(BATCH, length, WIDTH, requires_grad=True), Context(NoPosition(None))
        plain, recomputed = (kept(layer, x, context) for layer in layers)
        ratios = []
        for _ in range(8):
            first, second = (seconds(layer, x, context) for layer in layers)
            ratios.append(second / first)
        print(json.dumps({'system': name, 'batch': BATCH, 'length': length, 'MiB': round(plain, 1),
                          'MiB, recomputed': round(recomputed, 1),
                          'time ratio': round(statistics.median(ratios[1:]), 3)}), flush=True)
