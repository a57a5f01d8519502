"""--push-to-hub with a stub of the hub: refused without a token before any work, and the token is never shown."""

from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
from hf_world import make_folder

from trainer.cli import main
from trainer.convert.import_hf import import_hf

TOKEN = "hf_" + "SecretOfAPerson"


class Hub:
    """What would have been sent; fails where it is told to."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    fails: ClassVar[str | None] = None

    def __init__(self, token: str) -> None:
        Hub.calls.append(("token", token))

    def create_repo(self, repo: str, *, private: bool, exist_ok: bool) -> None:
        if Hub.fails is not None:
            raise RuntimeError(Hub.fails)
        Hub.calls.append(("repo", repo, private, exist_ok))

    def create_branch(self, repo: str, *, branch: str, exist_ok: bool) -> None:
        Hub.calls.append(("branch", repo, branch))

    def upload_folder(self, *, repo_id: str, folder_path: Path, revision: str | None, commit_message: str) -> None:
        Hub.calls.append(("upload", repo_id, revision, sorted(path.name for path in folder_path.iterdir())))


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(Hub, "fails", None)
    import_hf(make_folder(tmp_path / "hf", "llama"), tmp_path / "ckpt")
    source = ["--checkpoint-path", str(tmp_path / "ckpt"), "--save-path", str(tmp_path / "out")]
    return ["convert", *source, "--target-format", "hf", "--push-to-hub", "me/model"]


@pytest.mark.parametrize("branch", [None, "step-10"])
def test_the_finished_folder_is_uploaded(
    branch: str | None, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, *([] if branch is None else ["--revision", branch])]) == 0
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    branches = [] if branch is None else [("branch", "me/model", branch)]
    assert Hub.calls == [
        ("token", TOKEN), ("repo", "me/model", True, True), *branches, ("upload", "me/model", branch, files),
    ]  # fmt: skip
    said = capsys.readouterr()
    assert "pushed to https://huggingface.co/me/model" in said.out and TOKEN not in said.out + said.err


def test_without_a_token_nothing_is_done_and_the_remedy_is_said(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert main(words) == 1
    assert "HF_TOKEN" in capsys.readouterr().err and not (tmp_path / "out").exists() and Hub.calls == []


def test_a_failed_upload_keeps_the_folder_and_shows_no_token(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Hub, "fails", f"401 for Authorization: Bearer {TOKEN}")
    assert main(words) == 1
    said = capsys.readouterr()
    assert "was written, but not pushed to me/model: 401 for Authorization: Bearer ***" in said.err
    assert TOKEN not in said.out + said.err and (tmp_path / "out" / "model.safetensors").is_file()
