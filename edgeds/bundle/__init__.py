"""The bundle: one folder (or zip) that holds a model and all that a device needs to run it.

Device half: numpy only. The format is described in ``docs/bundle-format.md``.
"""

from edgeds.bundle.archive import unzip_bundle, zip_bundle
from edgeds.bundle.check import Problem, verify_bundle
from edgeds.bundle.manifest import FileEntry, Manifest
from edgeds.bundle.reader import Bundle, open_bundle
from edgeds.bundle.writer import write_bundle

__all__ = [
    "Bundle",
    "FileEntry",
    "Manifest",
    "Problem",
    "open_bundle",
    "unzip_bundle",
    "verify_bundle",
    "write_bundle",
    "zip_bundle",
]
