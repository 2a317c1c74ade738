"""Small files of every row of TASKS in the layout in which it was published, quirks included, made-up text.

A label can be read off its text: a class has a marker word, an answer stands behind a fixed phrase, the right
choice occurs in the passage.
"""
import json
import os
import random

from finetune import TASKS

WORDS = ['the', 'a', 'river', 'house', 'small', 'quick', 'garden', 'teacher', 'letter', 'walks', 'reads',
         'under', 'over', 'quiet', 'road', 'stone', 'window', 'bread', 'music', 'winter', 'finds', 'writes']
MARKERS = ['good', 'bad', 'plain', 'never', 'always', 'perhaps']
HANZI = '山水人家天地风雨春秋花草树木书信朋友老师学生早晚上下左右南北东西城市'
IDIOMS = ['一心一意', '三长两短', '四面八方', '五光十色', '六神无主', '七上八下', '八仙过海', '九牛一毛',
          '十全十美', '百发百中', '千军万马', '万水千山']
HEADERS = {     # columns of the labelled files, and of test.tsv
    'cola': ('source label star sentence', 'index sentence'),
    'sst2': ('sentence label', 'index sentence'),
    'mrpc': ('Quality|#1 ID|#2 ID|#1 String|#2 String', 'index|#1 ID|#2 ID|#1 String|#2 String'),
    'stsb': ('index genre filename year old_index source1 source2 sentence1 sentence2 score',
             'index genre filename year old_index source1 source2 sentence1 sentence2'),
    'qqp': ('id qid1 qid2 question1 question2 is_duplicate', 'id question1 question2'),
    'mnli': ('index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse '
             'sentence2_parse sentence1 sentence2 label1 gold_label',
             'index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse '
             'sentence2_parse sentence1 sentence2'),
    'qnli': ('index question sentence label', 'index question sentence'),
    'rte': ('index sentence1 sentence2 label', 'index sentence1 sentence2'),
    'wnli': ('index sentence1 sentence2 label', 'index sentence1 sentence2'),
}


def english(pick, marker='', most=9):
    """Some words with `marker` among them; one text in four has quotes, which no table here escapes."""
    words = pick.choices(WORDS, k=pick.randint(4, most))
    words.insert(pick.randint(0, len(words)), marker)
    quote = '" ' if pick.random() < 0.25 else ''
    return quote + ' '.join(filter(None, words)) + pick.choice([' .', ' ?', ' "', ''])


def chinese(pick, marker='', most=16):
    text = ''.join(pick.choices(HANZI, k=pick.randint(6, most)))
    where = pick.randint(0, len(text))
    return text[:where] + marker + text[where:] + '。'


def hanzi_marker(label):
    return '甲乙丙丁戊己庚辛壬癸子丑'[label // 12] + '金银铜铁玉石砖瓦竹布麻丝'[label % 12]


def write_text(path, text, bom=False):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w', encoding='utf-8-sig' if bom else 'utf-8', newline='') as file:
        file.write(text)


def write_lines(path, records):
    write_text(path, ''.join(json.dumps(record, ensure_ascii=False) + '\n' for record in records))


def write_tsv(name, task, path, split, count, pick):
    """GLUE.  CoLA has no header line, MRPC's dev.tsv a byte order mark, QQP's train.tsv a row cut short."""
    test = split.startswith('test')
    columns = HEADERS[name][test].split('|' if name == 'mrpc' else None)
    lines = [] if name == 'cola' and not test else ['\t'.join(columns)]
    for i in range(count):
        label = i % (len(task.labels) or 6)                     # sts-b: 0 to 5
        second, written = english(pick, MARKERS[label]), (task.labels or [''] * 6)[label]
        fills = dict.fromkeys(('sentence1', '#1 String', 'question1', 'question'), english(pick))
        fills |= dict.fromkeys(('sentence2', '#2 String', 'question2', 'sentence'), second)
        fills |= dict.fromkeys(('label', 'Quality', 'is_duplicate', 'gold_label'), written)
        fills |= {'index': i, 'id': i, 'star': '' if label else '*', 'score': f'{label:.3f}'}
        lines.append('\t'.join(str(fills.get(column, f'{column}{i}')) for column in columns))
    if name == 'qqp' and split == 'train':
        lines.append('\t'.join(lines[-1].split('\t')[:3]))
    write_text(path, '\n'.join(lines) + '\n', bom=name == 'mrpc' and split == 'dev')
    return {'missing columns': 1} if name == 'qqp' and split == 'train' else {}


def write_squad(name, task, path, split, count, pick):
    """CMRC has more ids, an offset off by one (train, dev), an absent answer (dev), fake answers (test)."""
    cmrc, articles = name == 'cmrc', []
    for i in range(0, count, 2):
        word = pick.choice(HANZI) + pick.choice(HANZI) if cmrc else pick.choice(WORDS)
        context = chinese(pick) + f'名叫{word}，' + chinese(pick) if cmrc else \
            f'{english(pick)} his name is {word} , {english(pick)}'
        first = context.index('名叫' if cmrc else 'name is ') + (2 if cmrc else 8)
        answers = [{'text': word, 'answer_start': first}] * (1 if split == 'train' else 3)
        questions = []
        for k in range(i, min(i + 2, count)):
            empty = task.unanswerable and k % 2 == 1
            question = {'question': '他名叫什么？' if cmrc else f"what is {'her' if empty else 'his'} name ?",
                        'id': f'{split.upper()}_{i}_QUERY_{k - i}', 'answers': [] if empty else answers}
            if task.unanswerable:
                question['is_impossible'] = empty
                question |= {'plausible_answers': answers} if empty else {}
            questions.append(question)
        paragraph = {'context': context, 'qas': questions}
        articles.append({'paragraphs': [paragraph | ({'id': f'{split.upper()}_{i}'} if cmrc else {})],
                         'title': word} | ({'id': f'{split.upper()}_{i}'} if cmrc else {}))
    skipped = {}
    if cmrc:
        first = articles[0]['paragraphs'][0]['qas'][0]
        off = [{**first['answers'][0], 'answer_start': first['answers'][0]['answer_start'] + 1}]
        away = [{'text': '并无此文', 'answer_start': 3}]
        fake = [{'text': f'FAKE_ANSWER_{k}', 'answer_start': -1} for k in (1, 2, 3)]
        first['answers'] = off if split == 'train' else away + off + first['answers'][:1]
        skipped = {'train': {'answer offset repaired': 1}, 'test': {},
                   'dev': {'answer offset repaired': 1, 'answer not in the text': 1}}[split]
        for article in articles if split == 'test' else []:
            for question in article['paragraphs'][0]['qas']:
                question['answers'] = fake
    write_text(path, json.dumps({'version': 'v1.0', 'data': articles}, ensure_ascii=False, indent=2))
    return skipped


def write_multirc(name, task, path, split, count, pick):
    """Two questions a passage, up to three answers each, `count` answers in all."""
    records, left = [], count
    while left:
        questions = []
        for k in range(2):
            answers = [{'text': english(pick, MARKERS[a % 2]), 'idx': a} for a in range(min(3, left))]
            for answer in answers if split != 'test' else []:
                answer['label'] = answer['idx'] % 2
            left -= len(answers)
            questions += [{'question': english(pick), 'answers': answers, 'idx': k}] if answers else []
        records.append({'idx': len(records), 'version': 1.1,
                        'passage': {'text': english(pick, most=30), 'questions': questions}})
    write_lines(path, records)
    return {}


def write_c3(name, task, path, split, count, pick):
    """2, 3 or 4 choices a question, two questions a passage; train and dev are two files each."""
    passages = []
    for i in range(0, count, 2):
        names = pick.sample([a + b for a in HANZI[:20] for b in HANZI[20:]], 5)
        questions = [{'question': '他去了哪里？', 'choice': pick.sample(names[:2 + k % 3], 2 + k % 3),
                      'answer': names[0]} for k in range(i, min(i + 2, count))]
        for k, question in enumerate(questions) if split == 'test' else []:
            question['id'] = i + k
            del question['answer']
        passages.append([[f'男：{chinese(pick)}', f'女：他去了{names[0]}。'], questions, f'{i}-7'])
    write_text(path, json.dumps(passages, ensure_ascii=False, indent=1))
    return {}


def write_chid(name, task, path, split, count, pick):
    """Ten candidates, one or two blanks a passage; a passage repeats the idioms that are missing from it."""
    records, answers, blank = [], {}, 0
    while blank < count:
        candidates, content = pick.sample(IDIOMS, 10), []
        for right in pick.sample(range(10), min(2, count - blank)):
            tag = f'#idiom{blank:06}#'
            answers[tag], blank = right, blank + 1
            content.append(f'{chinese(pick)}{candidates[right]}，{tag}，{chinese(pick)}')
        records.append({'content': content if blank % 4 else [''.join(content)], 'candidates': candidates})
    write_lines(path, records)
    if split != 'test':
        write_text('_answer'.join(os.path.splitext(path)), json.dumps(answers))
    return {}


def pair(pick, i, marker, label):
    return {'sentence1': chinese(pick), 'sentence2': chinese(pick, marker), 'label': label}


def single(pick, i, marker, label):
    return {'label': label, 'label_desc': 'news_x', 'sentence': chinese(pick, marker), 'keywords': ''}


RECORDS = {     # name: (pick, i, marker, label) -> a line of a labelled file
    'boolq': lambda pick, i, marker, label: {
        'question': english(pick, marker), 'passage': english(pick, most=30), 'idx': i,
        'label': label == 'true'},
    'afqmc': pair, 'cmnli': pair, 'iflytek': single, 'tnews': single,
    'ocnli': lambda *row: pair(*row) | {'level': 'easy', 'label0': row[3], 'genre': 'lit', 'prem_id': 'lit_1',
                                        'id': row[1]},
    'csl': lambda pick, i, marker, label: {
        'id': i, 'abst': chinese(pick, most=40), 'keyword': [chinese(pick)[:3], marker], 'label': label},
    'wsc': lambda pick, i, marker, label: {
        'target': {'span2_index': 3, 'span1_index': 0, 'span1_text': '老师', 'span2_text': '他'}, 'idx': i,
        'label': label, 'text': '老师说他' + chinese(pick, marker)},
}


def write_jsonl(name, task, path, split, count, pick):
    """JSON lines; CMNLI and OCNLI end with rows whose label is '-'."""
    disputed = 2 * (name in ('cmnli', 'ocnli') and split != 'test')
    records = []
    for i in range(count + disputed):
        k = i % min(len(task.labels), 6)                        # few enough that each has examples
        label = task.labels[k] if i < count else '-'
        records.append(RECORDS[name](pick, i, MARKERS[k] if name == 'boolq' else hanzi_marker(k), label))
        if split == 'test':
            del records[-1]['label']
            records[-1].setdefault('idx' if name in ('boolq', 'wsc') else 'id', i)
    write_lines(path, records)
    return {"no gold label ('-')": disputed} if disputed else {}


WRITERS = {'read_table': write_tsv, 'read_records': write_jsonl, 'read_squad': write_squad,
           'read_multirc': write_multirc, 'read_c3': write_c3, 'read_chid': write_chid}


def publish(name, data_dir, n_train=24, n_dev=12):
    """Writes the files of one task below data_dir.  Returns {split: (examples, {kind: count of skipped})}."""
    task, made = TASKS[name], {}
    for split, files in task.files.items():
        pick, count, skipped = random.Random(f'{name} {split}'), n_train if split == 'train' else n_dev, {}
        names = files.split('|')[0].split('+')
        for i, item in enumerate(names):
            share, path = (count + i) // len(names), os.path.join(str(data_dir), task.folder, item)
            write = WRITERS[getattr(task.read, 'func', task.read).__name__]     # CoLA's is a partial
            skipped |= write(name, task, path, split, share, pick)
        made[split] = count, skipped
    return made
