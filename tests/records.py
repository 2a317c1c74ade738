"""Made-up records of TASKS in the hub's form, each with a hint at its label, and copies of datasets."""
import random
from pathlib import Path

from finetune import TASKS

WORDS = ['the', 'a', 'river', 'house', 'small', 'quick', 'garden', 'teacher', 'walks', 'reads']
MARKERS = ['good', 'bad', 'plain', 'never', 'always', 'perhaps']


def write_copy(data_dir, name, splits):
    """Write records {split: [dict]} as the dataset of a task lies below --data_dir: parquet and a card."""
    from datasets import Dataset
    source, _, configuration = TASKS[name].hub.partition(':')
    folder, configuration = Path(data_dir, source), configuration or 'plain_text'
    (folder / configuration).mkdir(parents=True, exist_ok=True)
    lines = [f'- config_name: {configuration}', '  data_files:']
    for split, records in splits.items():
        path = f'{configuration}/{split}-00000-of-00001.parquet'
        Dataset.from_list(records).to_parquet(str(folder / path))
        lines += [f'  - split: {split}', f'    path: {path}']
    card = folder / 'README.md'
    known = card.read_text().split('---\n')[1] if card.exists() else 'configs:\n'
    card.write_text('---\n' + known + '\n'.join(lines) + '\n---\n')


def text_for(pick, marker='.'):
    return ' '.join([*pick.choices(WORDS, k=pick.randint(3, 8)), marker])


def make_class(name, i, pick, test):
    task = TASKS[name]
    label = i % min(len(task.labels) or 6, 6)
    columns = {column: text_for(pick) for column in task.columns}
    columns[task.columns[-1]] = text_for(pick, MARKERS[label])
    if name == 'csl':
        columns['keyword'] = columns['keyword'].split()
    label = float(label) if name == 'stsb' else label
    return {**columns, 'label': -1 if test else label, 'idx': i}


def make_wsc(name, i, pick, test):
    target = {'span1_index': 0, 'span1_text': 'the', 'span2_index': 4, 'span2_text': 'a'}
    text = 'the a ' + text_for(pick, MARKERS[i % 2])
    return {'idx': i, 'text': text, 'label': -1 if test else i % 2, 'target': target}


def make_multirc(name, i, pick, test):
    idx = {'paragraph': i // 4, 'question': i // 2 % 2, 'answer': i % 2}
    return {'paragraph': text_for(pick), 'question': text_for(pick), 'idx': idx,
            'answer': text_for(pick, MARKERS[i % 2]), 'label': -1 if test else i % 2}


def make_span(name, i, pick, test):
    """CMRC's test set has dummy answers; every other question of squad2 has none."""
    before = text_for(pick) + ' his name is '
    word = pick.choice(WORDS)
    none = name == 'squad2' and i % 2
    answers = {'text': [] if none else [word], 'answer_start': [] if none else [len(before)]}
    if test:
        answers = {'text': ['FAKE_ANSWER_1', 'FAKE_ANSWER_2'], 'answer_start': [-1, -1]}
    return {'id': f'Q{i}', 'context': f'{before}{word} , {text_for(pick)}', 'answers': answers,
            'question': f"what is {'her' if none else 'his'} name ?"}


def make_c3(name, i, pick, test):
    """Two to four choices."""
    names = pick.sample('bcdefghijklmnopqrstuvwxyz', 2 + i % 3)
    return {'id': i, 'context': [text_for(pick), f'always {names[0]}'], 'question': 'what name ?',
            'answer': '' if test else names[0], 'choice': pick.sample(names, len(names))}


def make_chid(name, i, pick, test):
    """Two blanks a passage, in which the missing idioms stand too."""
    rights = pick.sample(range(8), 2)
    content = [f'{WORDS[right]} #idiom{2 * i + k:06}# {text_for(pick)}' for k, right in enumerate(rights)]
    answers = {'candidate_id': [] if test else rights, 'text': [] if test else [WORDS[k] for k in rights]}
    return {'idx': i, 'candidates': WORDS, 'content': content, 'answers': answers}


MAKERS = {'wsc': make_wsc, 'multirc': make_multirc, 'squad1': make_span, 'squad2': make_span,
          'cmrc': make_span, 'c3': make_c3, 'chid': make_chid}


def made(name, n_train=12, n_dev=6, shared=False):
    """{split: records} of a task.  shared: the evaluation set has the training records"""
    splits = {}
    for split in TASKS[name].splits:
        train = split == 'train' or shared and split in TASKS[name].dev
        pick = random.Random(f"{name} {'train' if train else split}")
        make = MAKERS.get(name, make_class)
        test = split in TASKS[name].test
        n = n_train if train else n_dev
        splits[split] = [make(name, i, pick, test) for i in range(n)]
    return splits
