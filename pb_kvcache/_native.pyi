from typing import Any

from cffi import FFI

ffi: FFI
lib: Any
