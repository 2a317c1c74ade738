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
    configuration = configuration or 'plain_text'
    folder = Path(data_dir, source)
    folder.mkdir(parents=True, exist_ok=True)
    card = folder / 'README.md'
    text = card.read_text().removesuffix('---\n') if card.exists() else '---\nconfigs:\n'
    text += f'- config_name: {configuration}\n  data_files:\n'
    for split, records in splits.items():
        path = f'{configuration}/{split}.parquet'
        Dataset.from_list(records).to_parquet(folder / path)
        text += f'  - split: {split}\n    path: {path}\n'
    card.write_text(text + '---\n')


def text_for(pick, marker='.'):
    return ' '.join([*pick.choices(WORDS, k=pick.randint(3, 8)), marker])


def make_class(name, i, pick, test):
    task = TASKS[name]
    label = i % min(len(task.labels) or 6, 6)
    columns = {column: text_for(pick) for column in task.columns}
    columns[task.columns[-1]] = text_for(pick, MARKERS[label])
    if name == 'csl':
        columns['keyword'] = columns['keyword'].split()
    if name == 'stsb':
        label = float(label)
    return {**columns, 'label': -1 if test else label, 'idx': i}


def make_wsc(name, i, pick, test):
    label = i % 2
    target = {'span1_index': 0, 'span1_text': 'the', 'span2_index': 4, 'span2_text': 'a'}
    text = 'the a ' + text_for(pick, MARKERS[label])
    return {'idx': i, 'text': text, 'label': -1 if test else label, 'target': target}


def make_multirc(name, i, pick, test):
    label = i % 2
    return {
        'paragraph': text_for(pick), 'question': text_for(pick), 'answer': text_for(pick, MARKERS[label]),
        'label': -1 if test else label,
        'idx': {'paragraph': i // 4, 'question': i // 2 % 2, 'answer': label},
    }


def make_span(name, i, pick, test):
    """An answer has two words; CMRC's test set has dummy ones, every other question of squad2 has none."""
    before = text_for(pick) + ' his name is '
    word = ' '.join(pick.choices(WORDS, k=2))
    none = name == 'squad2' and i % 2
    answers = {'text': [] if none else [word], 'answer_start': [] if none else [len(before)]}
    if test:
        answers = {'text': ['FAKE_ANSWER_1', 'FAKE_ANSWER_2'], 'answer_start': [-1, -1]}
    return {'id': f'Q{i}', 'context': f'{before}{word} , {text_for(pick)}', 'answers': answers,
            'question': f"what is {'her' if none else 'his'} name ?"}


def make_c3(name, i, pick, test):
    """Two to four choices."""
    names = pick.sample('bcdefghijklmnopqrstuvwxyz', 2 + i % 3)
    right = names[0]
    return {
        'id': i, 'context': [text_for(pick), f'always {right}'], 'question': 'what name ?',
        'answer': '' if test else right, 'choice': pick.sample(names, len(names)),
    }


def make_chid(name, i, pick, test):
    """Two blanks a passage, in which the missing idioms stand too."""
    rights = pick.sample(range(8), 2)
    content = []
    for k, right in enumerate(rights):
        content.append(f'{WORDS[right]} #idiom{2 * i + k:06}# {text_for(pick)}')
    answers = {'candidate_id': [] if test else rights}
    return {'idx': i, 'candidates': WORDS, 'content': content, 'answers': answers}


MAKERS = {
    'wsc': make_wsc, 'multirc': make_multirc, 'c3': make_c3, 'chid': make_chid,
    'squad1': make_span, 'squad2': make_span, 'cmrc': make_span,
}


def made(name, n_train=12, n_dev=6):
    """{split: records} of a task."""
    task = TASKS[name]
    make = MAKERS.get(name, make_class)
    splits = {}
    for split in ('train', *task.dev, *task.test):
        pick = random.Random(f'{name} {split}')
        n = n_train if split == 'train' else n_dev
        splits[split] = [make(name, i, pick, split in task.test) for i in range(n)]
    return splits
