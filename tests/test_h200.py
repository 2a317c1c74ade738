"""The scripts of results/h200, on the CPU at toy size: they must still fit the stages when a GPU is there."""
import json
import os

import pytest
from conftest import ROOT, real_stage

pytestmark = pytest.mark.slow


def rows_of(script, folder, *words):
    """Run a script; returns the rows it has written to `folder`."""
    done = real_stage(f'results/h200/{script}.py', *words, timeout=500,
                      env={**os.environ, 'PYTHONPATH': ROOT, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0 and 'failed' not in done.stdout, (done.stdout, done.stderr)
    with open(os.path.join(folder, f'{script[2:]}.jsonl')) as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize('match', ['resume', 'stages', 'ddp', 'syncs', 'numbers original absolute',
                                   'watch gau rope'])
def test_correct(corpus, tmp_path, match):
    rows = rows_of('1_correct', tmp_path, '--toy', '--device=cpu', '--workers=1', f'--match={match}',
                   f'--data={corpus}', f'--out_dir={tmp_path}', f'--runs={tmp_path}/runs')
    assert rows and all(row['ok'] is True and match.startswith(row['job']) for row in rows), rows


def test_base(corpus, tmp_path):
    rows = rows_of('2_base', tmp_path, '--toy', '--device=cpu', '--match=512|both changes$',
                   f'--data={corpus}', f'--out_dir={tmp_path}')
    assert [row.get('kind') for row in rows[1:]] == [
        'one batch', 'with the loader', 'profile', 'one batch', 'profile']
    assert all(row['tokens/s'] > 0 for row in rows[1:3])


def test_systems(tmp_path):
    rows = rows_of('3_systems', tmp_path, '--toy', '--match=eager|small', f'--out_dir={tmp_path}')
    for case in ('small, of 4_study.py', 'all, eager'):
        assert [(row['kind'], row['system']) for row in rows if row['case'] == case] == [
            ('speed', 'original'), ('speed', 'gau'), ('memory', 'original'), ('memory', 'gau')]


def test_study(corpus, tmp_path):
    words = ['--toy', '--device=cpu', '--workers=2', '--steps=6', '--expected=1', f'--data={corpus}',
             f'--out_dir={tmp_path}', f'--raw={tmp_path}', f'--runs={tmp_path}/runs', '--match=Kowsher']
    rows = rows_of('4_study', tmp_path, *words)
    assert {row['system'] for row in rows} == {'shared'} and {1, 2, 3} <= {row['seed'] for row in rows}
    assert all(row['loss'] > 0 and len(row['curve']) == 4 for row in rows)
    done = real_stage('results/h200/tables.py', f'--raw={tmp_path}', f'--page={tmp_path}/STUDY.md',
                      env={**os.environ, 'PYTHONPATH': ROOT})
    text = (tmp_path / 'STUDY.md').read_text()
    assert done.returncode == 0 and f'{len(rows)} runs on cpu' in text and '| shared | 0.0' in text, text
