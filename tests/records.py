"""Records of every row of TASKS in the hub's form: made up, or from published files; and copies of datasets.

A label can be read off a made-up text: a class has a marker, an answer stands behind a fixed phrase, the
right choice occurs in the passage.
"""
import csv
import json
import random
from pathlib import Path

from finetune import TASKS

WORDS = ['the', 'a', 'river', 'house', 'small', 'quick', 'garden', 'teacher', 'walks', 'reads']
HANZI = '山水人家天地风雨春秋花草树木书信朋友老师学生早晚上下左右南北东西城市'
IDIOMS = ['一心一意', '三长两短', '四面八方', '五光十色', '六神无主', '七上八下', '八仙过海', '九牛一毛']
CHINESE = {'afqmc', 'csl', 'iflytek', 'tnews', 'wsc', 'cmnli', 'cmrc', 'chid', 'c3'}


def hub_split(split):
    return split.replace('dev', 'validation')


def write_copy(data_dir, name, splits):
    """Write records {split: [dict]} as the dataset of a task lies below --data_dir: parquet and a card."""
    from datasets import Dataset
    source, _, configuration = TASKS[name].hub.partition(':')
    folder, configuration = Path(data_dir, source), configuration or 'plain_text'
    (folder / configuration).mkdir(parents=True, exist_ok=True)
    lines = [f'- config_name: {configuration}', '  data_files:']
    for split, records in splits.items():
        path = f'{configuration}/{hub_split(split)}-00000-of-00001.parquet'
        Dataset.from_list(records).to_parquet(str(folder / path))
        lines += [f'  - split: {hub_split(split)}', f'    path: {path}']
    card = folder / 'README.md'
    known = card.read_text().split('---\n')[1] if card.exists() else 'configs:\n'
    card.write_text('---\n' + known + '\n'.join(lines) + '\n---\n')


# ---- made-up records ----

def text_for(name, pick, marker=''):
    if name in CHINESE:
        words = pick.choices(HANZI, k=pick.randint(6, 14))
        return ''.join([*words[:5], marker, *words[5:]]) + '。'
    return ' '.join([*pick.choices(WORDS, k=pick.randint(3, 8)), marker or '.'])


def marker_of(name, label):
    if name in CHINESE:
        return '甲乙丙丁戊己庚辛壬癸子丑'[label // 12] + '金银铜铁玉石砖瓦竹布麻丝'[label % 12]
    return ('good', 'bad', 'plain', 'never', 'always', 'perhaps')[label]


def make_class(name, i, pick, test):
    task = TASKS[name]
    label = i % min(len(task.labels) or 6, 6)
    columns = {column: text_for(name, pick) for column in task.texts}
    columns[task.texts[-1]] = text_for(name, pick, marker_of(name, label))
    if name == 'csl':
        columns['keyword'] = [columns['keyword'][:2], marker_of(name, label)]
    label = float(label) if name == 'stsb' else label
    return {**columns, 'label': -1 if test else label, 'idx': i}


def make_wsc(name, i, pick, test):
    target = {'span1_index': 0, 'span1_text': '老师', 'span2_index': 3, 'span2_text': '他'}
    text = '老师说他' + text_for(name, pick, marker_of(name, i % 2))
    return {'idx': i, 'text': text, 'label': -1 if test else i % 2, 'target': target}


def make_multirc(name, i, pick, test):
    idx = {'paragraph': i // 4, 'question': i // 2 % 2, 'answer': i % 2}
    return {'paragraph': text_for(name, pick), 'question': text_for(name, pick), 'idx': idx,
            'answer': text_for(name, pick, marker_of(name, i % 2)), 'label': -1 if test else i % 2}


def make_span(name, i, pick, test):
    """CMRC's test set has dummy answers; every other question of squad2 has none."""
    chinese = name == 'cmrc'
    word = pick.choice(HANZI) + pick.choice(HANZI) if chinese else pick.choice(WORDS)
    before = text_for(name, pick) + ('名叫' if chinese else ' his name is ')
    context = before + word + ('，' if chinese else ' , ') + text_for(name, pick)
    none = name == 'squad2' and i % 2
    answers = {'text': [] if none else [word], 'answer_start': [] if none else [len(before)]}
    if test:
        answers = {'text': [f'FAKE_ANSWER_{k}' for k in (1, 2)], 'answer_start': [-1, -1]}
    question = '他名叫什么？' if chinese else f"what is {'her' if none else 'his'} name ?"
    return {'id': f'Q{i}', 'context': context, 'question': question, 'answers': answers}


def make_c3(name, i, pick, test):
    """Two to four choices."""
    names = pick.sample([a + b for a in HANZI[:20] for b in HANZI[20:]], 2 + i % 3)
    context = [f'男：{text_for(name, pick)}', f'女：他去了{names[0]}。']
    return {'id': i, 'context': context, 'question': '他去了哪里？', 'answer': '' if test else names[0],
            'choice': pick.sample(names, len(names))}


def make_chid(name, i, pick, test):
    """Two blanks a passage, in which the missing idioms stand too."""
    rights = pick.sample(range(len(IDIOMS)), 2)
    content = [f'{IDIOMS[right]}，#idiom{2 * i + k:06}#，{text_for(name, pick)}'
               for k, right in enumerate(rights)]
    answers = {'candidate_id': [] if test else rights, 'text': [] if test else [IDIOMS[k] for k in rights]}
    return {'idx': i, 'candidates': IDIOMS, 'content': content, 'answers': answers}


MAKERS = {'wsc': make_wsc, 'multirc': make_multirc, 'squad1': make_span, 'squad2': make_span,
          'cmrc': make_span, 'c3': make_c3, 'chid': make_chid}


def made(name, n_train=12, n_dev=6, shared=False):
    """{split: records} of a task.  shared: the evaluation set has the training records"""
    splits = {}
    for split in TASKS[name].splits:
        train = split == 'train' or shared and split.startswith('dev')
        pick, make = random.Random(f"{name} {'train' if train else split}"), MAKERS.get(name, make_class)
        splits[split] = [make(name, i, pick, split.startswith('test'))
                         for i in range(n_train if train else n_dev)]
    return splits


# ---- published files, as their authors distribute them ----

def read_tsv(path, header=()):
    lines = [line.split('\t') for line in Path(path).read_text('utf-8-sig').rstrip('\n').split('\n')]
    columns, lines = (header, lines) if header else (lines[0], lines[1:])
    return [dict(zip(columns, cells, strict=True)) for cells in lines]


def published_glue(name, folder, split):
    names = {'cola': 'CoLA', 'sst2': 'SST-2', 'mrpc': 'MRPC', 'qnli': 'QNLI'}
    columns = {'#1 String': 'sentence1', '#2 String': 'sentence2', 'Quality': 'label'}
    header = ('source', 'label', 'star', 'sentence') if name == 'cola' and split != 'test' else ()
    labels, records = TASKS[name].labels, []
    for i, record in enumerate(read_tsv(Path(folder, 'glue', names[name], f'{split}.tsv'), header)):
        record = {columns.get(key, key): value for key, value in record.items()}
        label = labels.index(record['label']) if 'label' in record else -1
        records.append({key: record[key] for key in TASKS[name].texts} | {'label': label, 'idx': i})
    return records


def published_squad(name, folder, split):
    """A file in SQuAD's format."""
    records = []
    for article in json.loads(Path(folder).read_text('utf-8-sig'))['data']:
        for paragraph in article['paragraphs']:
            for question in paragraph['qas']:
                answers = {key: [answer[key] for answer in question['answers']]
                           for key in ('text', 'answer_start')}
                records.append({'id': question['id'], 'context': paragraph['context'],
                                'question': question['question'], 'answers': answers})
    return records


def published_cmrc(name, folder, split):
    return published_squad(name, Path(folder, 'clue/CMRC2018/cmrc2018_public', f'{split}.json'), split)


def published_boolq(name, folder, split):
    path = Path(folder, 'superglue/BoolQ', {'dev': 'val'}.get(split, split) + '.jsonl')
    return [{'question': record['question'], 'passage': record['passage'], 'idx': record['idx'],
             'label': int(record.get('label', -1))} for record in map(json.loads, open(path))]


def published_afqmc(name, folder, split):
    path = Path(folder, 'clue/AFQMC', 'train.csv' if split == 'train' else f'{split}.json')
    if split == 'train':
        records = list(csv.DictReader(path.read_text('utf-8-sig').splitlines()))
    else:
        records = [json.loads(line) for line in path.read_text('utf-8').splitlines()]
    return [{'sentence1': record['sentence1'], 'sentence2': record['sentence2'], 'idx': i,
             'label': int(record.get('label', -1))} for i, record in enumerate(records)]


def published_c3(name, folder, split):
    records = []
    for part in 'dm':
        passages = json.loads(Path(folder, 'clue/C3', f'c3-{part}-{split}.json').read_text('utf-8'))
        records += [{'context': context, **question}
                    for context, questions, *_ in passages for question in questions]
    return [{'id': i, **record} for i, record in enumerate(records)]


PUBLISHED = {'boolq': published_boolq, 'afqmc': published_afqmc, 'c3': published_c3, 'cmrc': published_cmrc,
             **dict.fromkeys(('cola', 'sst2', 'mrpc', 'qnli'), published_glue)}


def published(name, folder, split):
    """Records of a split of a task, from its authors' files below a folder."""
    return PUBLISHED[name](name, folder, split)
