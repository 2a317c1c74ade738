"""The tables of results/claims.md: the headline claims of the four papers, beside what has been seen here.

    $ python results/claims.py

1. what has been run: rows of the study and of other small runs, tables of other pages
2. words for what they show
3. the claims: for each a function that returns what was seen here, and the verdict
4. the tables: claims and printed values from papers.json, their price from reproduce.md; main

Needs pandas and scipy: pip install -r requirements-dev.txt
"""
import json
import math
import os
import re
import statistics

import plateau
import study

CANNOT_SEE = 'cannot see'
SUPPORTS = 'supports'
CONTRADICTS = 'contradicts'
GLUE_TASKS = ['CoLA', 'SST-2', 'MRPC']          # those of the study that are of GLUE


# ---- 1. what has been run ----

def read(name):
    with open(os.path.join(study.HERE, name), encoding='utf-8') as file:
        return file.read()


PAPERS = json.loads(read('papers.json'))
STUDY_ROWS = study.read_rows()
SCORES = study.scores_of(STUDY_ROWS)
# reference -> {measure: table of study.compare}; `original` has the learned positions of the papers
FOUND = {reference: study.compare_all(SCORES, reference) for reference in study.COMPARISONS}
# `shared` has its paper's other two baselines beside it; p is adjusted for these two
for position in '_rope', '':
    others = [f'symmetric{position}', f'pairwise{position}']
    FOUND[f'shared{position}'] = {task: study.compare(SCORES[task], f'shared{position}', others)
                                  for task in GLUE_TASKS}


def cells_of(line):
    """The cells of a line of a table in Markdown."""
    return [cell.strip() for cell in line.strip('|').split('|')]


def page_row(page, heading, first):
    """The other cells of the one table row of a page, below a heading, whose first cell is `first`."""
    below = read(page).partition(f'# {heading}\n')[2]
    section = re.split('^#', below, maxsplit=1, flags=re.MULTILINE)[0]
    rows = []
    for line in section.splitlines():
        if line.startswith(f'| {first} |'):
            rows.append(cells_of(line)[1:])
    [row] = rows
    return row


def page_numbers(page, pattern):
    """The groups, as numbers, of the one place of a page that matches a pattern."""
    [match] = re.finditer(pattern, read(page))
    return [float(group) for group in match.groups()]


def base_parameters(attention):
    """Parameters of a masked language model of BERT-base's size; tests hold that table to the model."""
    _, base, _, _ = page_row('systems.md', 'Parameters', f'`{attention}`')
    return int(base.replace(',', ''))


def curves(file, run):
    """The validations [(step, loss, accuracy), ...] of each seed of a run, from a file of curves."""
    found = []
    for line in read(file).splitlines():
        row = json.loads(line)
        if row['run'].rpartition('-')[0] == run:
            found.append(row['validation'])
    return found


def study_curves(system):
    """The same of a system of the study."""
    rows = study.rows_of(STUDY_ROWS, 'study')
    return [row['curve'] for row in rows if study.system_and_seed(row)[0] == system]


def printed_average(paper, name):
    """The average of a row of a paper's first table."""
    table = PAPERS[paper]['tables'][0]
    [numbers] = [row.partition('; ')[2] for row in table['rows'] if row.startswith(f'{name};')]
    return float(numbers.split()[len(table['columns'].split())])


# ---- 2. words for what they show ----

def listed(values):
    return ', '.join(str(value) for value in values)


def differences(reference, system, measures):
    """A system's measures less the reference's, each with half of its 95 % interval and Dunnett's p."""
    cells = []
    for measure in measures:
        found = FOUND[reference][measure].loc[system]
        cells.append(f'{measure} {study.shown_difference(measure, found)}')
    return listed(cells)


NOT_TOLD = 'not told apart'


def told_sign(found, claimed):
    """Whether a difference has the claimed sign (1 or -1), if Dunnett's test tells it from 0."""
    if found['dunnett'] >= study.LEVEL:
        return NOT_TOLD
    return 'agrees in sign' if found['difference'] * claimed > 0 else 'disagrees in sign'


def told_below(found, limit):
    """Whether (estimate, low, high, ...) is below a limit, as is claimed, if its interval excludes that."""
    _, low, high, *_ = found
    if low < limit < high:
        return NOT_TOLD
    return 'agrees in sign' if high <= limit else 'disagrees in sign'


def signs(words, at='on'):
    """words: {where: as of told_sign()} -> in which places a sign was told"""
    told = {'agrees in sign': [], 'disagrees in sign': []}
    for where, word in words.items():
        if word != NOT_TOLD:
            told[word].append(where)
    parts = [f"{word} {at} {' and '.join(places)}" for word, places in told.items() if places]
    return listed(parts) if parts else NOT_TOLD


def signs_of(reference, system, measures, claimed):
    """signs() of a system of the study, less a reference, of each measure."""
    return signs({measure: told_sign(FOUND[reference][measure].loc[system], claimed) for measure in measures})


def beside_original(system, measures, claimed):
    """(seen, verdict) of a system beside `original`, both with `rope` and both with `absolute`."""
    with_rope = differences('original_rope', f'{system}_rope', measures)
    with_absolute = differences('original', system, measures)
    seen = f'study: with `rope` {with_rope}; with `absolute` {with_absolute}'
    rope_signs = signs_of('original_rope', f'{system}_rope', measures, claimed)
    absolute_signs = signs_of('original', system, measures, claimed)
    verdict = f'{CANNOT_SEE}; with `rope` {rope_signs}, with `absolute` {absolute_signs}'
    return seen, verdict


def ratio_signs(ratios):
    """Whether a system is ahead, by what it takes over what the other takes."""
    if all(ratio < 1 for ratio in ratios):
        return 'agrees in sign'
    if all(ratio > 1 for ratio in ratios):
        return 'disagrees in sign'
    return 'both signs'


# ---- 3. the claims ----

def never_run():
    return 'nothing has been run', CANNOT_SEE


def courtois_parameters():
    ours = [f'{base_parameters(name):,}' for name in ('original', 'symmetric', 'pairwise')]
    printed = listed(PAPERS['courtois']['bench']['parameters'])
    if all(f' {count};' in printed for count in ours):
        return listed(ours), f'{SUPPORTS}: the same counts'
    return listed(ours), CONTRADICTS


def courtois_plateau():
    counted, _ = plateau.balanced(plateau.read_rows())
    ratios = plateau.ratios(counted)
    contrasts = plateau.contrasts(counted)
    adjusted = plateau.primary_p(contrasts)
    seen = []
    verdicts = []
    for system in plateau.PRIMARY:
        of_sizes = {size: ratios[system, size] for size in plateau.SIZES}
        cells = listed(map(plateau.shown_estimate, of_sizes.values()))
        slope = plateau.shown_interval(contrasts[system]).replace('-', '−')
        p = study.shown_p(adjusted[system])
        seen.append(f'`{system}` {cells}, slope with size less that of `original` {slope}, '
                    f"Holm's p of two {p}")
        words = signs({size: told_below(ratio, 1) for size, ratio in of_sizes.items()}, 'at')
        slope_word = told_below(contrasts[system], 0) if adjusted[system] < study.LEVEL else NOT_TOLD
        verdicts.append(f'`{system}` {words}, its slope {slope_word}')
    return ('[plateau.md](plateau.md), tokens until a model uses their order, over those of `original`, at '
            f"{listed(plateau.SIZES)}: {'; '.join(seen)}. {study_plateaus()}",
            f"{CANNOT_SEE}: the claim is of base; {'; '.join(verdicts)}; with `rope` `original` leaves first")


def study_plateaus():
    level = SCORES['loss'].loc['no_position'].mean() - study.PLATEAU_MARGIN
    with_rope = []
    absolute = []
    for name in ('original', 'symmetric', 'pairwise'):
        ends = [study.plateau_end(curve, level) for curve in study_curves(f'{name}_rope')]
        with_rope.append(f'`{name}` {listed(ends)}')
        absolute += [study.plateau_end(curve, level) for curve in study_curves(name)]
    left = sum(end is not None for end in absolute)
    return (f"Study, step at which the plateau ends: with `rope` {'; '.join(with_rope)}; "
            f'with `absolute` in {left} of {len(absolute)} runs')


def courtois_final_loss():
    seen, verdict = beside_original('pairwise', ['loss'], -1)
    with_rope = shown_range(FOUND['original_rope']['loss'].loc['pairwise_rope'])
    small = plateau_loss('pairwise')
    return (f'{seen}; {AT_ONE_RATE} {study.shown_difference("loss", small)}',
            f'{verdict}; with `rope` it is {with_rope}, at 2 x 128 {shown_range(small)}')


def courtois_final_loss_of_symmetric():
    seen, verdict = beside_original('symmetric', ['loss'], 1)
    small = plateau_loss('symmetric')
    return (f'{seen}; {AT_ONE_RATE} {study.shown_difference("loss", small)}',
            f'{verdict}; at 2 x 128 {told_sign(small, 1)}')


AT_ONE_RATE = '[plateau.md](plateau.md#the-second-arm), 2 x 128 with `absolute`, one rate for all: loss'


def plateau_loss(system):
    """The last loss less that of `original` in the second arm of plateau.md: a row of study.compare."""
    _, full = plateau.balanced(plateau.read_rows())
    return plateau.full_differences(plateau.full_scores(full)['loss']).loc[system]


def shown_range(found):
    """The 95 % interval of a difference."""
    low = found['difference'] - found['half']
    high = found['difference'] + found['half']
    return f'{low:+.2f} to {high:+.2f}'.replace('-', '−')


OF_ONE_MODEL = 'in brackets their deviation of five fine-tunings of one pretrained model'


def courtois_glue():
    seen, verdict = beside_original('pairwise', GLUE_TASKS, 1)
    claimed = printed_average('courtois', 'pairwise base') - printed_average('courtois', 'original base')
    halves = [FOUND['original_rope'][task].loc['pairwise_rope', 'half'] for task in GLUE_TASKS]
    if claimed < min(halves):
        verdict += f'; their {claimed:.2f} points are less than each ±'
    return seen, f'{verdict}; {OF_ONE_MODEL}'


def courtois_glue_of_symmetric():
    seen, verdict = beside_original('symmetric', GLUE_TASKS, -1)
    return seen, f'{verdict}; {OF_ONE_MODEL}'


def courtois_glue_by_step():
    seen, verdict = never_run()
    return seen, f'{verdict}; without a failed trial of theirs 54,000 for 65,000 ([errata](errata.md))'


def kowsher_parameters():
    ours = base_parameters('shared')
    original = base_parameters('original')
    saved = 100 * (1 - ours / original)
    d = 768
    of_three = 100 * (1 - (d * d + 3 * d) / (3 * d * d))
    of_four = 100 * (1 - (2 * d * d + 3 * d) / (4 * d * d))
    seen = (f'{ours:,} and {original:,}, {saved:.2f} % fewer; in the attention {of_three:.2f} %, with its '
            f'output matrix {of_four:.2f} %')
    return seen, f'{SUPPORTS}, but for last digits ([errata](errata.md))'


def kowsher_glue():
    return beside_original('shared', GLUE_TASKS, 1)


def kowsher_glue_of_the_others():
    seen = []
    verdicts = []
    for words, position in ('with `rope`', '_rope'), ('with `absolute`', ''):
        for name in 'symmetric', 'pairwise':
            pair = f'shared{position}', f'{name}{position}'
            seen.append(f'{words} `{name}` {differences(*pair, GLUE_TASKS)}')
            verdicts.append(f'{words} `{name}` {signs_of(*pair, GLUE_TASKS, -1)}')
    return f"study, less `shared`: {'; '.join(seen)}", f'{CANNOT_SEE}; {listed(verdicts)}'


def kowsher_seconds():
    [speedup] = page_numbers('bench.md', r'over `original`: `pairwise`\s+[\d.]+, `shared` (\d+\.\d+)')
    _, at_256, at_512, *_ = page_row('bench.md', "BERT-base's width", '`shared`')
    ratios = [1 / speedup, float(at_256), float(at_512)]
    seen = (f'step of a classifier, 256 wide: {ratios[0]:.2f}; of pretraining, 768 wide: {at_256} at 256 '
            f'tokens, {at_512} at 512 ([bench.md](bench.md#bert-bases-width))')
    return seen, f'{CANNOT_SEE}; on CPUs {ratio_signs(ratios)}'


def tian_time_of_base():
    milliseconds = study.step_times(STUDY_ROWS)
    in_study = milliseconds['shatter'] / milliseconds['original']
    *_, small = page_row('systems.md', 'Every system on small runs', '`shatter`')
    _, at_256, at_512, *_ = page_row('bench.md', "BERT-base's width", '`shatter`')
    ratios = [in_study, *map(float, small.split()), float(at_256), float(at_512)]
    seen = (f'study: {in_study:.2f}; small models: {listed(small.split())} at 64, 128 and 512 tokens '
            f'([systems.md](systems.md)); 768 wide: {at_256} at 256 tokens, {at_512} at 512 '
            '([bench.md](bench.md#bert-bases-width))')
    return seen, f'{CANNOT_SEE}; on CPUs {ratio_signs(ratios)}'


def tian_memory():
    heading = "Memory of Shatter's steps"
    *_, at_256 = page_row('systems.md', heading, '256')
    *_, at_512 = page_row('systems.md', heading, '512')
    ratio = float(at_256.split()[0]) / float(at_512.split()[0])
    shatter = [float(cell.replace(',', '')) for cell in page_row('systems.md', heading, '`shatter`')]
    _, original = [float(cell.replace(',', '')) for cell in page_row('systems.md', heading, '`original`')]
    step = shatter[0] / shatter[1]
    over_bert = shatter[0] / original
    seen = (f'at 256 over 512 tokens: what a layer keeps for the backward pass {ratio:.2f}; the peak of '
            f"a step of 4 layers {step:.2f}, over BERT's at 512 {over_bert:.2f} "
            '([systems.md](systems.md#memory-of-shatters-steps))')
    return seen, (f'{CANNOT_SEE}; a layer {ratio_signs([ratio / 0.5])}, a step {ratio_signs([step / 0.5])}, '
                  f'a step beside one of BERT at 512 {ratio_signs([over_bert / 0.5])}')


def tian_loss():
    means = SCORES['loss'].mean(axis=1)
    seen = (f"study, other texts: `shatter` {means['shatter']:.2f}, BERT {means['original']:.2f}, without "
            f"positions {means['no_position']:.2f}")
    return seen, CANNOT_SEE + whether_bert_learned()


def whether_bert_learned():
    if 'original' in study.learned_systems(SCORES):
        return ''
    return ': BERT has not left the plateau'


def tian_fewer_steps():
    level = SCORES['loss'].loc['no_position'].mean() - study.PLATEAU_MARGIN
    cells = []
    for system, name in ('shatter', '`shatter`'), ('original', 'BERT'):
        ends = [study.plateau_end(curve, level) for curve in study_curves(system)]
        cells.append(f"{name} {listed(end if end else 'never' for end in ends)}")
    return f"study, step at which the plateau ends: {'; '.join(cells)}", CANNOT_SEE + whether_bert_learned()


def tian_steps():
    order = ['no_position', 'one_head_softmax', 'part_mask', 'one_head_sigmoid', 'part_bias', 'shatter']
    means = []
    for name in order:
        last_losses = [curve[-1][1] for curve in curves('systems.jsonl', f'{name}-2e-3')]
        means.append(statistics.mean(last_losses))
    cells = [f'`{name}` {mean:.3f}' for name, mean in zip(order, means, strict=True)]
    seen = f'0.9 million parameters, mean of three seeds: {listed(cells)} ([systems.md](systems.md))'
    falls = means == sorted(means, reverse=True)
    return seen, f"{CANNOT_SEE}; the order of the means {'agrees' if falls else 'disagrees'}"


def tian_glue():
    seen = (f"study: {differences('original', 'shatter', GLUE_TASKS)}; a BERT without positions: "
            f"{differences('original', 'no_position', GLUE_TASKS)}")
    told = signs_of('original', 'shatter', GLUE_TASKS, 1)
    return seen, f'{CANNOT_SEE}{whether_bert_learned()}; {told}'


def liu_masked_accuracy():
    heading = "GAU's scales and normalisers at n = 4 s"
    cells = []
    for name in ('softmax_plus', 'softmax', 'scaled_squared_relu', 'squared_relu'):
        first = '`squared_relu` / ns2' if name == 'squared_relu' else f'`{name}`'
        *_, accuracy, _ = page_row('systems.md', heading, first)
        cells.append(f'`{name}` {accuracy}')
    # -0.42 ± 0.31 in joined rows and -0.24 ± 0.09 in single documents, as his rows are
    number = r'(-?\d+\.\d+) ± (\d+\.\d+)'
    sentence = rf'`softmax` less `ns2` is {number} nats in\s+joined rows and {number} in single documents'
    _, _, squared, squared_half = page_numbers('systems.md', sentence)
    sentence = rf'less `scaled_squared_relu` {number}\s+and {number}'
    _, _, scaled, scaled_half = page_numbers('systems.md', sentence)
    seen = (f'0.9 million parameters, 600 steps, %: {listed(cells)}; loss of `softmax` less that of '
            f'`squared_relu` {squared} ± {squared_half}, of `scaled_squared_relu` {scaled} ± {scaled_half} '
            '([systems.md](systems.md#gaus-scales-and-normalisers-at-n--4-s))')
    lower = squared + squared_half < 0 and scaled + scaled_half < 0
    verdict = f"{CANNOT_SEE}; `softmax` {'agrees in sign' if lower else 'not told apart'}"
    return seen.replace(' -', ' −'), verdict


def liu_row(what):
    """RoFormerV2's time or memory over GAU's at 256, 512, 1024 and 2048 tokens, with Liu's settings."""
    cells = page_row('bench.md', "Liu's table 4 with his settings, small", f'{what}, RoFormerV2')
    return [cell.partition(' (')[0] for cell in cells]


LIU_LINK = '([bench.md](bench.md#lius-table-4-with-his-settings-small))'


def liu_memory():
    shares = liu_row('memory')
    *_, without_dropout, _, _, _ = page_row('bench.md', "BERT-base's width", 'memory, RoFormerV2')
    seen = (f'V2, with his settings but 2 layers and one row: {listed(shares)} at 256, 512, 1024 and '
            f'2048 tokens {LIU_LINK}; without dropout {without_dropout} at 512')
    with_his = ratio_signs([100 / float(share.split()[0]) for share in shares[1:]])
    without = ratio_signs([100 / float(without_dropout.split()[0])])
    return seen, f'{CANNOT_SEE}; on CPUs from 512 tokens on {with_his}, without dropout {without}'


def liu_time():
    ratios = liu_row('time')
    *_, without_dropout, _, _, _ = page_row('bench.md', "BERT-base's width", 'RoFormerV2')
    seen = (f'V2, with his settings but 2 layers and one row: {listed(ratios)} at 256, 512, 1024 and '
            f'2048 tokens {LIU_LINK}; without dropout {without_dropout} at 512')
    longer = ratio_signs([1 / float(ratio) for ratio in ratios[2:]])
    without = ratio_signs([1 / float(without_dropout)])
    return seen, (f'{CANNOT_SEE}; on CPUs {ratios[1]} at 512 tokens, from 1024 on {longer}, '
                  f'without dropout {without}')


def liu_clue():
    measures = ['loss', *GLUE_TASKS]
    seen = ('nothing in Chinese. Study: `gau` less RoFormerV1, which is `original` with `rope`: '
            f"{differences('original_rope', 'gau', measures)}")
    return seen, f"{CANNOT_SEE}; in English {signs_of('original_rope', 'gau', GLUE_TASKS, 1)}"


# ---- 4. the tables ----

CLAIMS = {          # paper -> {name of a claim in papers.json: its function}
    'courtois': {
        'parameters': courtois_parameters,
        'plateau': courtois_plateau,
        'final loss': courtois_final_loss,
        'final loss of symmetric': courtois_final_loss_of_symmetric,
        'GLUE': courtois_glue,
        'GLUE of symmetric': courtois_glue_of_symmetric,
        'GLUE by step': courtois_glue_by_step,
    },
    'kowsher': {
        'parameters': kowsher_parameters,
        'GLUE': kowsher_glue,
        'GLUE of the others': kowsher_glue_of_the_others,
        'noise': never_run,
        'other tasks': never_run,
        'seconds': kowsher_seconds,
    },
    'tian': {
        'time of base': tian_time_of_base,
        'time of large': never_run,
        'memory': tian_memory,
        'longer rows': never_run,
        'loss': tian_loss,
        'fewer steps': tian_fewer_steps,
        'a week on GPUs': never_run,
        'steps to Shatter': tian_steps,
        'GLUE': tian_glue,
    },
    'liu': {
        'masked accuracy': liu_masked_accuracy,
        'memory': liu_memory,
        'time': liu_time,
        'CLUE': liu_clue,
    },
}


def gpu_hours():
    """{run: hours of one GPU}, from the table "Price" of reproduce.md."""
    hours = {}
    for line in read('reproduce.md').splitlines():
        cells = cells_of(line)
        if len(cells) == 8 and re.fullmatch(r'\d+\.\d', cells[6]):
            for run in re.findall(r'`(\w+)`', cells[1]):
                hours[run] = float(cells[6])
    return hours


def to_run(claim):
    """The groups of commands of reproduce.md, and the hours of one GPU or what else they need."""
    commands = listed(claim['commands'].split())
    if 'needs' in claim:
        return f"{commands}: {claim['needs']}"
    hours = gpu_hours()
    total = sum(count * hours[run] for run, count in claim['runs'].items())
    return f'{commands}: {math.ceil(total)} GPU hours'


def main():
    for paper, functions in CLAIMS.items():
        claims = {claim['name']: claim for claim in PAPERS[paper]['claims']}
        lines = []
        for name, function in functions.items():
            claim = claims[name]
            seen, verdict = function()
            lines.append([claim['claim'], claim['printed'], to_run(claim), seen, verdict])
        study.print_table(paper, ['claim', 'printed', 'to run it', 'seen here', 'verdict'], lines)


if __name__ == '__main__':
    main()
