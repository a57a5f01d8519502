"""A finished export to the Hugging Face hub. The token is the person's own; it is looked up, used, and never shown."""

from pathlib import Path

from trainer.convert.hf_model import ConvertError


def check_token() -> str:
    """The token of this machine, before any work is done. Raises ConvertError with what to do where there is none."""
    from huggingface_hub import get_token

    token = get_token()
    if not token:
        raise ConvertError(
            "--push-to-hub needs a Hugging Face token, and there is none: set HF_TOKEN, or log in with `hf auth login`."
        )
    return str(token)


def push(folder: Path, repo: str, *, token: str, revision: str | None = None) -> str:
    """Upload the folder to a repository (made private where it does not exist), to a branch where one is named.

    Returns its address. Raises ConvertError; the folder stays.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    try:
        api.create_repo(repo, private=True, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message="pawl export")
    except Exception as error:  # the library's own, requests', the network's
        why = (str(error) or repr(error)).replace(token, "***")
        raise ConvertError(f"{folder} was written, but not pushed to {repo}: {why}") from None
    return f"https://huggingface.co/{repo}" + ("" if revision is None else f"/tree/{revision}")
