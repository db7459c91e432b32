"""The error tree: what a caller can catch, and what the messages carry."""

import inspect

import pytest

from edgeds import errors


def _classes() -> list[type]:
    return [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", _classes(), ids=lambda kind: kind.__name__)
def test_every_error_is_an_edgeds_error_and_documented(kind: type) -> None:
    assert issubclass(kind, errors.EdgedsError)
    assert kind.__doc__ or kind is errors.MissingDependency
    assert kind.__name__ in (errors.__doc__ or ""), "the tree at the top of the file is complete"


def test_errors_are_also_the_builtin_kind_that_callers_expect() -> None:
    assert issubclass(errors.SpecError, ValueError)
    assert issubclass(errors.InputError, ValueError)
    assert issubclass(errors.MissingDependency, ImportError)
    assert issubclass(errors.OutOfMemory, errors.DeviceError)


def test_missing_dependency_names_package_extra_and_command() -> None:
    error = errors.MissingDependency("onnxruntime", extra="cpu", purpose="running on the CPU")
    assert (error.package, error.extra) == ("onnxruntime", "cpu")
    text = str(error)
    assert "running on the CPU" in text
    assert "pip install 'edgeds[cpu]'" in text


def test_a_package_that_is_there_but_broken_is_not_to_be_installed() -> None:
    missing = errors.MissingDependency(
        "p", extra="cpu", purpose="this", cause=ModuleNotFoundError("No module named 'p'")
    )
    broken = errors.MissingDependency("p", extra="cpu", purpose="this", cause=ImportError("libx.so:\n cannot open"))
    assert "pip install 'edgeds[cpu]'" in str(missing)
    assert "cannot be loaded (libx.so: cannot open)" in str(broken)
    assert "pip install" not in str(broken)
