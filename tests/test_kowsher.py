"""results/kowsher.py: noise on the embeddings, and the trials of one task on others."""
# ruff: noqa: F401, F811 (fixtures are known by their names)
import pytest
import torch
from conftest import words
from test_finetune import copies, knobs, run, trial, tune
from test_train import CPU

import finetune
import kowsher
from finetune import TASKS, Data, Example, collate


def test_the_norm_of_the_noise(run, copies):
    model, tokenizer = finetune.make_model(f'{run}/ckpt_0000003.pt', TASKS['cola'], 1, knobs())
    data = finetune.load_data(TASKS['cola'], 'validation', tokenizer, 48, knobs(data_dir=copies))
    batch = collate(data.features, 0)
    batch.pop('targets')
    seen = []
    with torch.no_grad():
        plain = model.encoder.embed(batch['ids'], batch['segments'])
        hook = kowsher.add_noise(model.eval(), data, CPU, 0.3)
        model.encoder.dropout.register_forward_hook(lambda module, inputs, x: seen.append(x))
        model(**batch)
    hook.remove()
    norms = (seen[0] - plain).norm(dim=-1)
    token_norms = plain.norm(dim=-1)[batch['attention_mask']]           # of tokens, not of padding
    expected = 0.3 * token_norms.mean()
    assert torch.allclose(norms, expected.expand_as(norms), rtol=1e-4)


def test_cross_tasks_are_reduced_to_yes_and_no(stage, trial, copies, tmp_path):
    """MNLI's positive class is 0, QQP's 1."""
    examples = [Example(i, (), label) for i, label in enumerate([1, 1, 0])]
    data = Data(TASKS['qqp'], examples, [], 0)
    assert kowsher.cross_score('mnli', 'qqp', data, [0, 1, 2]) == pytest.approx(2 / 3)
    result = trial('mnli')
    done = stage('kowsher', *words(out_dir=tmp_path / 'out', runs='base', tasks='mnli,qqp', cross=True,
                                   noise='0,20', data_dir=copies, device='cpu'))
    own = f"{100 * result['scores']['mnli']['accuracy']:.2f}"
    assert done.out.startswith(f"{result['folder']}: 0 {own}, 20 ")
    assert f', mnli {own}, qqp ' in done.out.splitlines()[0]
