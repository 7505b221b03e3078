"""Puts a converted checkpoint into an object store: whole, or not recognisable as a checkpoint."""

from contextlib import suppress
from pathlib import Path

from griffin_eval.converters.containers.orbax.find import COMMITTED, TREE_METADATA
from griffin_eval.converters.containers.orbax.remote import listed_in, reason, stand_in, tensorstore
from griffin_eval.errors import ArgumentError, BadInput

_LOCK = ".griffin_partial"


class RemoteOutput:
    """A context manager that yields a folder to write small files into, which stands for a URL.

    The writer of Orbax puts arrays straight into the store. On success the small files follow,
    ``_METADATA`` and ``commit_success.txt`` last: without the first nobody takes the rest for a
    checkpoint, nor does Orbax, in Google Cloud Storage, without the second. After an exception
    everything that was written is removed. After a kill it stays, mostly with the file
    ``.griffin_partial``, and is refused until it is removed.

    Raises:
        ArgumentError: something is there already.
        BadInput: the store refuses.
    """

    def __init__(self, url: str):
        self._url = url

    def __enter__(self) -> Path:
        self._store, names = listed_in(self._url)
        if _LOCK in names:
            raise ArgumentError(
                f"{self._url} holds what another conversion is writing, or left when it was cut "
                "off: remove everything there, or name another destination"
            )
        if names:
            raise ArgumentError(f"{self._url} already exists: remove it, or name another")
        self.path = stand_in(self._url)
        try:
            written = self._store.write(_LOCK, b"being written", if_equal=b"").result()
        except (ValueError, OSError) as error:
            raise self._refused(error) from None
        if not written.generation:
            raise ArgumentError(f"another process is writing {self._url}: wait until it ends")
        return self.path

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._remove()
            return
        try:
            files = [path for path in sorted(self.path.rglob("*")) if path.is_file()]
            names = [path.relative_to(self.path).as_posix() for path in files]
            for name in sorted(names, key=lambda name: (name == TREE_METADATA, name)):
                if name == TREE_METADATA:
                    self._store.write(_LOCK, None).result()
                self._store.write(name, (self.path / name).read_bytes()).result()
            if TREE_METADATA in names:
                self._store.write(COMMITTED, f"{self._url} is complete".encode()).result()
        except (ValueError, OSError) as error:
            self._remove()
            raise self._refused(error) from None

    def _remove(self) -> None:
        """Remove everything, as far as the store allows it: first the files that make it a
        checkpoint, last the file that marks it as partial."""
        ranges = tensorstore().KvStore.KeyRange
        with suppress(ValueError, OSError):
            self._store.write(TREE_METADATA, None).result()
            self._store.delete_range(ranges(exclusive_max=_LOCK)).result()
            self._store.delete_range(ranges(inclusive_min=_LOCK + "\0")).result()
            self._store.write(_LOCK, None).result()

    def _refused(self, error: Exception) -> BadInput:
        return BadInput(f"{self._url} cannot be written: {reason(error)}")
