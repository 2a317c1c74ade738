"""results/claims.md: the tables of its script, with the commands of reproduce.md, values of papers.json."""
import json
import math
import os
import re

import pandas as pd
import pytest
from test_configs import PAGE, called, read, resolved

import train

PAPERS = json.loads(read('results', 'papers.json'))
CLAIMS = [(paper, claim) for paper, book in PAPERS.items() for claim in book['claims']]


@pytest.fixture
def claims(script):
    return script('claims')


def test_the_tables_are_those_that_the_script_prints(claims, capsys):
    claims.main()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith('|')]
    page = [line for line in read('results', 'claims.md').splitlines() if line.startswith('|')]
    assert page == printed
    assert len(page) == len(CLAIMS) + 2 * len(PAPERS)


def test_every_claim_of_papers_json_has_its_function(claims):
    for paper, book in PAPERS.items():
        assert [claim['name'] for claim in book['claims']] == [*claims.CLAIMS[paper]]


def runs_by_group():
    """{group of commands of reproduce.md: {run: its knobs}}"""
    script = '\n'.join(re.findall(r'```sh\n(.*?)```', PAGE, re.S))
    marked = re.sub(r'^# ([CKTL]\d+): .*$', r'python group \1', script, flags=re.M)
    groups = {}
    for command in called(marked):
        if command.startswith('python group '):
            label = command.split()[-1]
            groups[label] = {}
            continue
        module, settings = resolved(command)
        if module is train:
            groups[label][os.path.basename(settings['out_dir'])] = settings
    return groups


def test_commands_and_runs_are_those_of_reproduce():
    """Each run that a claim pays for is made by one of the groups of commands that it names."""
    groups = runs_by_group()
    for _, claim in CLAIMS:
        made = {}
        for label in claim['commands'].split():
            made |= groups[label]
        assert {*claim.get('runs', ())} <= {*made}, claim
        assert ('runs' in claim) != ('needs' in claim), claim


def test_printed_values_are_those_of_the_papers_tables():
    for paper, claim in CLAIMS:
        rest = {key: part for key, part in PAPERS[paper].items() if key != 'claims'}
        number = r'\d+(?:,\d{3})*(?:\.\d+)?'
        known = set(re.findall(number, json.dumps(rest)))
        printed = set(re.findall(number, claim['printed']))
        assert {text for text in printed if re.search('[.,]', text)} <= known, claim


def test_hours_are_sums_of_the_price_table(claims):
    by_name = {(paper, claim['name']): claims.to_run(claim) for paper, claim in CLAIMS}
    assert by_name['courtois', 'GLUE'] == f'C1, C2, C5: {math.ceil(10.7 + 10.0)} GPU hours'
    assert by_name['liu', 'masked accuracy'] == f'L1, L3: {math.ceil(8 * 0.6)} GPU hours'
    assert by_name['tian', 'memory'] == 'T16: a GPU'


def test_shared_is_compared_with_its_papers_other_baselines(claims):
    """Theirs less its own: where `shared` is below them, the claim's sign is another."""
    table = claims.FOUND['shared_rope']['CoLA']
    means = claims.SCORES['CoLA'].mean(axis=1)
    assert [*table.index] == ['symmetric_rope', 'pairwise_rope']
    assert (table.difference == means[table.index] - means['shared_rope']).all()
    assert (table.difference > 0).all()
    seen, verdict = claims.kowsher_glue_of_the_others()
    assert f"with `rope` `symmetric` CoLA **+{table.difference['symmetric_rope']:.1f} ±" in seen
    assert 'with `rope` `symmetric` disagrees in sign on CoLA' in verdict


def test_a_sign_counts_only_if_it_is_told_from_zero(claims, monkeypatch):
    table = pd.DataFrame({'difference': [-2.0, 3.0], 'half': 1.0, 'dunnett': [0.04, 0.06]}, ['shared', 'gau'])
    monkeypatch.setattr(claims, 'FOUND', {'original': {'CoLA': table, 'MRPC': table.assign(dunnett=0.001)}})
    assert claims.signs_of('original', 'shared', ['CoLA', 'MRPC'], 1) == 'disagrees in sign on CoLA and MRPC'
    assert claims.signs_of('original', 'shared', ['CoLA'], -1) == 'agrees in sign on CoLA'
    assert claims.signs_of('original', 'gau', ['CoLA'], 1) == 'not told apart'
    assert claims.signs_of('original', 'gau', ['CoLA', 'MRPC'], 1) == 'agrees in sign on MRPC'
    assert [claims.ratio_signs(ratios) for ratios in ([0.9, 0.8], [1.1, 1.2], [0.9, 1.1])] == [
        'agrees in sign', 'disagrees in sign', 'both signs']
    intervals = {'a': (0.7, 0.6, 0.9), 'b': (1.2, 1.1, 1.4), 'c': (0.9, 0.8, 1.1), 'd': (0.5, 0.4, 0.6)}
    words = {where: claims.told_below(interval, 1) for where, interval in intervals.items()}
    assert claims.signs(words, 'at') == 'agrees in sign at a and d, disagrees in sign at b'
