"""Weights uploaded to a hub of models, beside training: what `push_to_hub` and `hub_*` ask for."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from transformers import TrainerCallback

from memsafe_rl.checkpoint.store import RUN_STATE, checkpoint_folder
from memsafe_rl.errors import ConfigError

logger = logging.getLogger(__name__)


class HubPush(TrainerCallback):  # type: ignore[misc]
    """Uploads checkpoints as `hub_strategy` says; a failed upload is told and never ends the run."""

    def __init__(self, args: Any) -> None:
        self._args, self._api = args, HfApi(token=args.hub_token)
        self._uploads: list[Future[Any]] = []
        self.repo_id: str | None = None

    def open(self, private: bool | None = None) -> str:
        """Makes the repository, and its branch, where they are not there; gives its full name."""
        if self.repo_id is None:
            args = self._args
            name = args.hub_model_id or Path(args.output_dir).name
            private = args.hub_private_repo if private is None else private
            try:
                repo_id = str(self._api.create_repo(name, private=private, exist_ok=True).repo_id)
                if args.hub_revision is not None:
                    self._api.create_branch(repo_id, branch=args.hub_revision, exist_ok=True)
            except Exception as error:  # the client's errors differ between its versions
                told = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                raise ConfigError(
                    f"hub_model_id is {name!r}, which cannot be opened ({told}). Log in (`hf auth login`) or set "
                    "hub_token, or leave push_to_hub out."
                ) from error
            self.repo_id = repo_id
        return self.repo_id

    def push(
        self, write: Callable[[Path], Any], message: str, *, wait: bool, place: str | None = None, **more: Any
    ) -> Any:
        """Uploads what is written into an empty folder; gives the commit, or its future where nobody waits for it."""
        folder = Path(tempfile.mkdtemp(prefix=".push-", dir=self._args.output_dir))
        upload: Future[Any] | None = None
        try:
            write(folder)
            repo_id, more = self.open(), {"revision": self._args.hub_revision, **more}
            upload = self._api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                path_in_repo=place,
                commit_message=message,
                run_as_future=True,
                **more,
            )
            self._uploads.append(upload)
            return upload.result() if wait else upload
        finally:
            if upload is None or wait:
                shutil.rmtree(folder)
            else:
                upload.add_done_callback(lambda _: shutil.rmtree(folder))

    def card(
        self, name: str | None, dataset_name: str | None = None, tags: Sequence[str] | str | None = None
    ) -> ModelCard:
        """Writes a card of the run's model; its name is that of the run's folder if None."""
        algorithm, own = self._args.algorithm, [tags] if isinstance(tags, str) else list(tags or ())
        name = name or Path(self._args.output_dir).name
        return model_card(name, f"Trained with {algorithm}.", algorithm.lower(), *own, datasets=dataset_name)

    def push_model(
        self,
        save: Callable[..., Any],
        message: str,
        *,
        wait: bool,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        model_name: str | None = None,
        **facts: Any,
    ) -> Any:
        """Uploads what ``save`` writes for users, with a card; see `PolicyTrainer.push_to_hub`."""
        self._api = HfApi(token=token) if token else self._api
        card = self.card(model_name or self.open(private).split("/")[-1], **facts)

        def write(folder: Path) -> None:
            save(str(folder), _internal_call=True)
            card.save(folder / "README.md")

        return self.push(write, message, wait=wait, **({"revision": revision} if revision else {}))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Uploads the weights of a checkpoint, and the checkpoint itself where `hub_strategy` asks for it."""
        busy = any(not upload.done() for upload in self._uploads)
        if args.hub_strategy == "end" or (busy and not args.hub_always_push):
            return
        self._tell_failures()
        source = checkpoint_folder(Path(args.output_dir), state.global_step)
        message = f"Training in progress, step {state.global_step}"
        place = {"checkpoint": "last-checkpoint", "all_checkpoints": source.name}.get(args.hub_strategy.value)
        self.push(lambda folder: _link(source, folder, RUN_STATE), message, wait=False)
        if place is not None:
            self.push(lambda folder: _link(source, folder), f"{message}, checkpoint", wait=False, place=place)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Waits for what is under way."""
        self._tell_failures(wait=True)

    def _tell_failures(self, *, wait: bool = False) -> None:
        for upload in [upload for upload in self._uploads if wait or upload.done()]:
            self._uploads.remove(upload)
            if (error := upload.exception()) is not None:
                logger.warning("an upload to %s failed; training continues: %s", self.repo_id, error)


def model_card(name: str, text: str, *tags: str, library_name: str = "transformers", **data: Any) -> ModelCard:
    """Writes a card of a model that was trained here."""
    head = ModelCardData(library_name=library_name, model_name=name, tags=["memsafe_rl", *tags], **data)
    return ModelCard(f"---\n{head.to_yaml()}\n---\n\n# {name}\n\n{text}\n")


def _link(source: Path, folder: Path, left_out: frozenset[str] = frozenset()) -> None:
    """Links a checkpoint's files into a folder, for the checkpoint may be removed while they are uploaded."""
    for path in source.iterdir():
        if path.is_file() and path.name not in left_out:
            target = folder / path.name
            with suppress(OSError):  # file systems without links
                os.link(path, target)
            if not target.exists():
                shutil.copy2(path, target)
