"""The simulated TensorRT as an importable package, for whole commands: our reading of the API, never a TensorRT run.

Put ``tests/simdevice/packages`` and ``tests`` on PYTHONPATH and the folder of a stand-in ``libcuda.so.1`` on
LD_LIBRARY_PATH (``simdevice.simcuda.simulated_environment`` does it).
"""

import sys

from simdevice.simbuild import add_builder
from simdevice.simcuda import SimCuda
from simdevice.simtrt import make_tensorrt

_module = make_tensorrt(SimCuda("libcuda.so.1"), version="10.3.0")
add_builder(_module, version="10.3.0")
_names = {name: value for name, value in vars(_module).items() if not name.startswith("__")}
vars(sys.modules[__name__]).update(_names, __version__="10.3.0")
