"""What changes beside a model's versions while they load. Where that is the model's own doing, as a cache or a log is,
it is no reason to load it again."""

import logging
from contextlib import suppress

from .file_marks import EntryMarks, SourceMark, changed_entries
from .model_registry import LoadedModel, ModelEntry
from .model_source import ModelSource, VersionSource, find_versions, marks_beside

log = logging.getLogger(__name__)


def is_current(name: str, loaded: LoadedModel | None, version: VersionSource) -> bool:
    """Whether a version is loaded as it is now. The log says what changed where only something beside it did."""
    if loaded is None or version.mark is None or loaded.source_mark is None or loaded.unfit:
        return False
    if loaded.source_mark == version.mark:
        return True
    if loaded.source_mark._replace(beside=version.mark.beside) == version.mark:
        changed = ", ".join(sorted(changed_entries(loaded.source_mark.beside, version.mark.beside)))
        log.info("model '%s' is loaded again for what changed beside its versions: %s", name, changed)
    return False


def look_beside(source: ModelSource) -> EntryMarks | None:
    """The marks of what lies beside the versions of a source by now; None where nothing does, or it cannot be read."""
    if source.directory is not None:
        with suppress(OSError):
            return marks_beside(source.directory, find_versions(source.directory))
    return None


def take_own_changes(entry: ModelEntry, read: SourceMark | None, after: EntryMarks | None) -> None:
    """Take for a model's own doing what changed while it loaded, from what was `read`, and the time before, too. What
    changes during one load alone may have come from somebody else, and is loaded."""
    if read is None or after is None:
        return
    changed = changed_entries(read.beside, after)
    own = changed & entry.changed_in_load
    entry.changed_in_load = changed
    if not own:
        return
    log.info("model '%s' changes %s itself when it loads, which is no change of it", entry.name, ", ".join(sorted(own)))
    kept = [pair for pair in read.beside if pair[0] not in own]
    beside = tuple(sorted(kept + [pair for pair in after if pair[0] in own]))
    for loaded in entry.loaded_versions.values():
        if loaded.source_mark is not None and loaded.source_mark.beside == read.beside:
            loaded.source_mark = loaded.source_mark._replace(beside=beside)
