"""What is read from the hub, over HTTP: a corpus, a task of GLUE, a BERT; and a hub that fails."""
import json
import os
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import datasets
import huggingface_hub
import pyarrow.parquet
import pytest
import transformers
from conftest import process, refused, words
from records import made, write_copy
from test_prepare_data import VOCAB, encoded, knobs, make_texts, read_all, unit_texts, write_jsonl

import prepare_data
from prepare_data import load_tokenizer


def never(path, given):
    """Hub.fail of a hub that works."""


class Hub(ThreadingHTTPServer):
    """The part of the hub's protocol that is needed, for the folders {datasets,models}/OWNER/NAME of a root.

    fail(path, range) -> None, an HTTP status, or 'cut': the connection ends within the answer
    """
    daemon_threads = True

    def __init__(self, root):
        super().__init__(('127.0.0.1', 0), Request)
        self.root = root
        self.sha = 'a' * 40
        self.fail = never
        self.asked = []                                         # (path, range) of each answer
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, address):
        """A client that has gone is no error."""


class Request(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *arguments):
        pass

    def answer(self, status, body=b'', cut=False, **headers):
        self.send_response(status)
        for name, value in {'Content-Length': len(body), **headers}.items():
            self.send_header(name.replace('_', '-'), str(value))
        self.end_headers()
        if self.command != 'HEAD':
            self.wfile.write(body[:len(body) // 2] if cut else body)
        self.close_connection = cut

    def do_GET(self):
        """[api/][datasets/]OWNER/NAME[/resolve/COMMIT/FILE]"""
        body = self.rfile.read(int(self.headers.get('Content-Length', 0)))
        hub = self.server
        path = unquote(urlsplit(self.path).path).strip('/')
        given = self.headers.get('Range')
        hub.asked.append((path, given))
        failed = hub.fail(path, given)
        if failed and failed != 'cut':
            return self.answer(failed)
        parts = path.removeprefix('api/').split('/')
        if parts[0] not in ('datasets', 'models'):
            parts = ['models', *parts]
        folder = hub.root.joinpath(*parts[:3])
        commit = next((part for part in parts if re.fullmatch('[ab]{40}', part)), hub.sha)
        if path.startswith('api/'):
            content = self.describe(folder, commit, parts[3:], body)
            return self.answer(200, json.dumps(content).encode(), Content_Type='application/json')
        file = folder.joinpath(*parts[5:])
        about = {'X_Repo_Commit': commit}
        if not file.is_file():
            return self.answer(404, X_Error_Code='EntryNotFound', **about)
        data = file.read_bytes()
        about['ETag'] = f'"{file}"'
        if not given:
            return self.answer(200, data, **about)
        first, last = re.fullmatch('bytes=([0-9]+)-([0-9]*)', given).groups()
        part = data[int(first):int(last or len(data)) + 1]
        about['Content_Range'] = f'bytes {first}-{int(first) + len(part) - 1}/{len(data)}'
        self.answer(206, part, failed == 'cut', **about)

    do_HEAD = do_POST = do_GET

    def describe(self, folder, commit, asked, body):
        """Of a repository; of the files below a path, [tree, COMMIT, PATH]; of files that the body names."""
        files = [file for file in sorted(folder.rglob('*')) if file.is_file()]
        entries = [{'type': 'file', 'path': str(file.relative_to(folder)), 'size': file.stat().st_size,
                    'oid': str(file)} for file in files]
        if asked[:1] == ['paths-info']:
            return [entry for entry in entries if entry['path'] in parse_qs(body.decode())['paths']]
        if asked[:1] == ['tree']:
            return [entry for entry in entries if entry['path'].startswith('/'.join(asked[2:]))]
        return {'id': '/'.join(folder.parts[-2:]), 'sha': commit,
                'siblings': [{'rfilename': entry['path']} for entry in entries]}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub of the folder tmp_path/hub, for this process and those that it starts, without pauses."""
    server = Hub(tmp_path / 'hub')
    address = f'http://127.0.0.1:{server.server_port}'
    home = str(tmp_path / 'home')
    environment = {'HF_ENDPOINT': address, 'HF_HUB_OFFLINE': '0', 'HF_HOME': home}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    constants = huggingface_hub.constants
    url = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    for name, value in {'HF_HUB_OFFLINE': False, 'HUGGINGFACE_CO_URL_TEMPLATE': url, 'ENDPOINT': address,
                        'HF_HUB_CACHE': f'{home}/hub'}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(datasets.config, 'HF_ENDPOINT', address)
    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(time, 'sleep', lambda seconds: None)
    forget()
    yield server
    server.shutdown()
    server.server_close()
    forget()


def forget():
    """What this process has read of a hub: another process knows nothing of it."""
    huggingface_hub.HfFileSystem.clear_instance_cache()
    prepare_data.open_hub.cache_clear()


def write_corpus(hub, texts):
    """owner/texts: two parquet files of three row groups each; returns the texts."""
    folder = hub.root / 'datasets' / 'owner' / 'texts'
    folder.mkdir(parents=True)
    for k in range(2):
        table = pyarrow.table({'text': texts[60 * k:60 * k + 60]})
        pyarrow.parquet.write_table(table, folder / f'train-{k}.parquet', row_group_size=20)
    return texts


def command(home, **changes):
    """Words of prepare_data.py's command line."""
    return words(**knobs(home, **{'corpus': 'owner/texts', **changes}))


def test_rows_of_the_hub_are_documents_or_joined(hub, monkeypatch):
    """Row groups where files are few, but whole files where rows are joined."""
    rows = [text if i % 6 else f' = {i} = ' for i, text in enumerate([None, *make_texts(59)], 1)]
    write_corpus(hub, 2 * rows)
    for name in ('books', 'wikipedia', 'wikitext'):
        source = prepare_data.CORPUS[name]._replace(place='owner/texts', subset='')
        monkeypatch.setitem(prepare_data.CORPUS, name, source)
    found, dropped = unit_texts('books+wikipedia')
    assert [len(texts) for texts in found] == [1, 1] + 2 * [19, 20, 20]
    assert dropped == {"rows without text in 'text'": 4}
    found, _ = unit_texts('wikitext')
    assert [len(texts) for texts in found] == [11, 11]          # no article is cut


@pytest.mark.slow
def test_a_corpus_is_read_by_row_groups_in_two_workers(hub, tmp_path):
    """An error in a worker is one line, and no semaphore is left behind."""
    texts = write_corpus(hub, make_texts(120))
    folder = f'{tmp_path}/data/x'
    hub.fail = lambda path, given: 404 if 'units.json' in os.listdir(folder) else None
    done = process('prepare_data.py', *command(tmp_path, num_proc=2))
    assert (done.code, done.err.count('repeat the command; it goes on\n')) == (2, 1)
    hub.fail = never
    again = process('prepare_data.py', *command(tmp_path, num_proc=2))
    assert again.code == 0, again.err
    assert not re.search('leaked|Traceback', done.err + again.err)
    assert read_all(folder, prepare_data.load_meta(folder)) == sorted(encoded(folder, texts))


@pytest.mark.parametrize('when', ['planning', 'writing'])
@pytest.mark.parametrize('status', [
    503, 'cut', *(pytest.param(status, marks=pytest.mark.slow) for status in (401, 404, 429))])
def test_a_hub_that_fails_is_one_line_and_the_command_goes_on(hub, tmp_path, stage, when, status):
    """Another commit that comes between changes nothing: the plan names the one that it was made of."""
    texts = write_corpus(hub, make_texts(120))
    folder = tmp_path / 'data' / 'x'

    def fail(path, given):
        is_planned = (folder / 'units.json').exists()
        if is_planned == (when == 'writing') and given and path.endswith('-1.parquet'):
            return status
    hub.fail = fail
    done = stage('prepare_data', *command(tmp_path))
    assert done.code == 2
    said = {'planning': 'error: owner/texts: .*\n$', 'writing': f'error: {folder}: .*; it goes on\n'}[when]
    assert re.search(said, done.err), done.err
    before = {file: file.stat().st_mtime_ns for file in folder.glob('unit_*')}
    assert len(before) == {'planning': 0, 'writing': 3}[when]

    hub.fail = never
    hub.sha = 'b' * 40
    forget()
    hub.asked.clear()
    assert stage('prepare_data', *command(tmp_path)).code == 0
    assert read_all(folder, prepare_data.load_meta(folder)) == sorted(encoded(folder, texts))
    assert before == {file: file.stat().st_mtime_ns for file in before}
    commits = {path.split('/')[4] for path, _ in hub.asked if path.endswith('.parquet')}
    assert commits == {('a' if when == 'writing' else 'b') * 40}


def write_vocabulary(folder):
    """Files of a BERT's tokenizer with the words VOCAB."""
    transformers.BertTokenizer(vocab={piece: i for i, piece in enumerate(VOCAB)}).save_pretrained(folder)


def test_a_tokenizer_of_the_hub(hub, tmp_path, stage):
    """It is read once: a command without a network does without the hub."""
    folder = hub.root / 'models' / 'owner' / 'bert'
    write_vocabulary(folder)
    (folder / 'model.safetensors').write_bytes(b'large')
    given = {'corpus': write_jsonl(tmp_path / 'a.jsonl', make_texts(60)), 'tokenizer': 'library:owner/bert'}
    for status in (401, 404, 503):
        hub.fail = lambda path, given, status=status: status
        said = refused(stage('prepare_data', *command(tmp_path, **given)))
        assert "tokenizer='library:owner/bert': " in said
    hub.fail = never
    assert stage('prepare_data', *command(tmp_path, **given)).code == 0
    assert load_tokenizer(tmp_path / 'data' / 'x').pieces == VOCAB
    assert 'model.safetensors' not in {path.split('/')[-1] for path, _ in hub.asked}
    hub.fail = lambda path, given: 503                          # the hub's cache has its files now
    assert stage('prepare_data', *command(tmp_path, **given, name='y')).code == 0


def test_a_bert_is_tuned_to_a_task_of_the_hub(hub, tmp_path, stage):
    """RTE, whose test split gets a file of predictions."""
    folder = hub.root / 'models' / 'owner' / 'bert'
    write_vocabulary(folder)
    transformers.BertModel(transformers.BertConfig(
        vocab_size=len(VOCAB), hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=32, max_position_embeddings=32)).save_pretrained(folder)
    write_copy(hub.root / 'datasets', 'rte', made('rte', 16, 16))
    done = stage('finetune', *words(
        init_from='owner/bert', tasks='rte', trials=1, epochs=1, block_size=32, device='cpu',
        dtype='float32', out_dir=tmp_path / 'tuned', predict='test'))
    assert done.code == 0, done.err
    predictions = tmp_path / 'tuned' / 'bert' / 'rte_1' / 'test_rte.tsv'
    assert len(predictions.read_text().splitlines()) == 17
