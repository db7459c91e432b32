"""The error tree. Every message says what was wrong, where, and what to do.

EdgedsError
├── SpecError(ValueError)          a bad argument, unknown key or malformed value
├── ModelError                     a model file that cannot be read, is invalid or is not supported
├── CalibrationError               an empty, duplicate, non-finite or mismatching calibration set
├── BudgetError                    no configuration fits the budget
├── BuildError                     an engine build failed
├── EngineMismatch                 an engine or preprocessing that does not belong to this bundle or device
├── BundleError                    a bundle that is damaged, unsafe or of an unknown version
├── InputError(ValueError)         one request's data cannot be processed (bad image, wrong shape or dtype)
├── DeviceError
│   ├── CudaError
│   ├── OutOfMemory
│   └── SensorUnavailable
├── QueueFull                      back-pressure: the session's queue is full
├── PoolExhausted                  back-pressure: no page of the KV pool is left
├── DeadlineExceeded               a request expired before it was computed
├── SessionClosed                  a request met a session that is closed or closing
└── MissingDependency(ImportError) names the extra to install
"""

from __future__ import annotations


class EdgedsError(Exception):
    """Base of every error that edgeds raises on purpose."""


class SpecError(EdgedsError, ValueError):
    """A bad argument, an unknown key or a malformed value. The CLI exits with 2."""


class ModelError(EdgedsError):
    """A model file cannot be read, is invalid, or uses something that is not supported."""


class CalibrationError(EdgedsError):
    """A calibration set is empty, repeats samples, holds non-finite values or does not fit the model."""


class BudgetError(EdgedsError):
    """No power mode, batch or resolution meets the budget."""


class BuildError(EdgedsError):
    """An engine could not be built."""


class EngineMismatch(EdgedsError):
    """An engine, preprocessing or calibration does not belong to this bundle or device."""


class BundleError(EdgedsError):
    """A bundle is damaged, unsafe, incomplete or of an unknown schema version."""


class InputError(EdgedsError, ValueError):
    """One request's data cannot be processed; other requests are not affected."""


class DeviceError(EdgedsError):
    """A device or its driver failed."""


class CudaError(DeviceError):
    """A CUDA driver call failed."""


class OutOfMemory(DeviceError):
    """Not enough memory; the message states what was needed and what was free, in MiB."""


class SensorUnavailable(DeviceError):
    """A sensor does not exist here or cannot be read."""


class QueueFull(EdgedsError):
    """The session's queue is full and its policy rejects new requests (or dropped this one)."""


class PoolExhausted(EdgedsError):
    """The KV pool has too few pages left; nothing was changed. Preempt or close a sequence, then try again."""


class DeadlineExceeded(EdgedsError):
    """A request's deadline passed before it was computed."""


class SessionClosed(EdgedsError):
    """The session is closed; nothing more can be submitted."""


class MissingDependency(EdgedsError, ImportError):
    """An optional package is needed. ``extra`` names the edgeds extra that brings it.

    ``cause`` is what its import raised: a package that is there and cannot be loaded is not to be installed again.
    """

    def __init__(self, package: str, *, extra: str, purpose: str, cause: ImportError | None = None) -> None:
        self.package = package
        self.extra = extra
        advice = f"install it with: pip install 'edgeds[{extra}]'"
        if cause is not None and not isinstance(cause, ModuleNotFoundError):
            advice = f"it is there but cannot be loaded ({' '.join(str(cause).split())}); see: edgeds doctor"
        super().__init__(f"{purpose} needs the package '{package}'; {advice}")
