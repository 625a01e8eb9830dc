"""Loading a target: stop ids, tokenizer, chats, and what is said when something is absent."""

import json
import shutil

import pytest

from jdlite.checkpoints.huggingface import load_huggingface, save_huggingface
from jdlite.checkpoints.target import Target, load_target
from jdlite.errors import CheckpointError, PromptError
from tests.checkpoints.test_gguf import write_gguf
from tests.models.parity import GOLDEN


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A complete folder: weights, tokenizer with chat template, generation config."""
    folder = tmp_path_factory.mktemp("target")
    target = load_target(write_gguf(folder / "m.gguf", "smollm2"))
    return save_huggingface(target.model, folder / "hf", target.tokenizer, generation={"eos_token_id": [1, 7]})


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "hf")


def rewrite(path, **changes):
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def test_stop_ids_come_from_the_first_file_that_has_them(folder):
    assert load_target(folder).eos_ids == (1, 7)
    rewrite(folder / "config.json", eos_token_id=9)
    assert load_target(folder).eos_ids == (1, 7)
    (folder / "generation_config.json").unlink()
    assert load_target(folder).eos_ids == (9,)
    rewrite(folder / "config.json", eos_token_id=None)
    assert load_target(folder).eos_ids == (1,)


def test_chat_is_formatted_without_added_special_tokens(folder):
    target = load_target(folder)
    ids = target.encode_chat([{"role": "user", "content": "ab"}])
    assert target.tokenizer.decode(ids) == "<|start|>user\nab<|end|><|start|>"
    assert ids.count(0) == 2


def test_weights_hash_tells_weights_apart(folder):
    one, same, other = load_target(folder), load_target(folder), load_target(folder, "bfloat16")
    assert one.weights_hash == same.weights_hash != other.weights_hash


def test_config_is_the_models(folder):
    target = load_target(folder)
    assert target.config is target.model.config
    assert target.source == str(folder)
    assert target.generation == {"eos_token_id": [1, 7]}


def test_a_folder_without_tokenizer_loads_and_refuses_text():
    target = load_target(GOLDEN / "qwen3")
    assert target.tokenizer is None
    assert target.eos_ids == ()
    with pytest.raises(PromptError, match="has no tokenizer; give token ids"):
        target.encode("ab")


def test_a_chat_without_template_is_refused(folder):
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(PromptError, match="has no chat template; give a plain prompt or a chat model"):
        load_target(folder).encode_chat([{"role": "user", "content": "ab"}])


def test_messages_that_the_template_cannot_format_are_refused(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match=r"cannot format these messages .*roles must alternate"):
        load_target(folder).encode_chat([{"role": "user", "content": "ab"}])


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no folder at .*; check the path, or give a hub id"):
        load_target(tmp_path / "none" / "here")


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(CheckpointError, match="is a file; give the folder"):
        load_target(tmp_path / "model.bin")


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json; give a complete Hugging Face model folder"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not readable JSON"), ("[]", "must hold a JSON object: got a list")]
)
def test_a_damaged_config_is_refused(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_target(tmp_path)


def test_a_damaged_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* cannot be read"):
        load_target(folder)


def test_a_hub_id_that_cannot_be_fetched_is_refused(monkeypatch):
    def offline(repo, **options):
        assert options["allow_patterns"]
        raise ConnectionError("Connection refused\nlong trace")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"could not be fetched from the hub \(Connection refused\)"):
        load_target("owner/name")


def test_a_hub_id_is_fetched(monkeypatch, saved):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo, **options: str(saved))
    assert load_target("owner/name").source == "owner/name"


def test_a_target_can_be_made_from_a_model_alone():
    target = Target(model=load_huggingface(GOLDEN / "qwen3"))
    with pytest.raises(PromptError, match="the target has no tokenizer"):
        target.encode_chat([])
