# Finds libtorch as `Torch`: from Torch_DIR or CMAKE_PREFIX_PATH, else from the Python that is asked for, else the system's.
if(NOT Torch_DIR AND Python_EXECUTABLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import torch.utils; print(torch.utils.cmake_prefix_path)"
    OUTPUT_VARIABLE w4a8_torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(EXISTS "${w4a8_torch_prefix}/Torch/TorchConfig.cmake")
    set(Torch_DIR "${w4a8_torch_prefix}/Torch")
  endif()
endif()
if(Torch_DIR)
  # torch's config looks for its libraries in the system's folders first: a second torch there would be mixed in.
  get_filename_component(w4a8_torch_root "${Torch_DIR}/../../.." ABSOLUTE)
  list(PREPEND CMAKE_PREFIX_PATH "${w4a8_torch_root}")
endif()
find_package(Torch REQUIRED)
# torch's own config sets C++ flags for its ABI; everything that links torch must agree.
if(TORCH_CXX_FLAGS)
  separate_arguments(W4A8_TORCH_CXX_FLAGS NATIVE_COMMAND "${TORCH_CXX_FLAGS}")
endif()
