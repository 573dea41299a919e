# Finds libtorch: from Torch_DIR or CMAKE_PREFIX_PATH, else from the Python that is asked for, else the system's. Sets
# TORCH_INCLUDE_DIRS, TORCH_LIBRARIES and W4A8_TORCH_CXX_FLAGS. Part of the C++ package, too.
if(NOT Torch_DIR AND Python_EXECUTABLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import torch.utils; print(torch.utils.cmake_prefix_path)"
    OUTPUT_VARIABLE w4a8_torch_prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(EXISTS "${w4a8_torch_prefix}/Torch/TorchConfig.cmake")
    set(Torch_DIR "${w4a8_torch_prefix}/Torch")
  endif()
endif()
if(NOT Torch_DIR)
  find_path(w4a8_torch_config TorchConfig.cmake PATHS ${CMAKE_PREFIX_PATH} PATH_SUFFIXES share/cmake/Torch
            NO_DEFAULT_PATH NO_CACHE)
  if(w4a8_torch_config)
    set(Torch_DIR "${w4a8_torch_config}")
  endif()
endif()
if(Torch_DIR)
  # torch's config looks for its libraries in the system's folders first: a second torch there would be mixed in.
  get_filename_component(w4a8_torch_root "${Torch_DIR}/../../.." ABSOLUTE)
  list(PREPEND CMAKE_PREFIX_PATH "${w4a8_torch_root}")
  file(GLOB w4a8_torch_gpu "${w4a8_torch_root}/lib/libtorch_cuda.so" "${w4a8_torch_root}/lib/libtorch_hip.so"
       "${w4a8_torch_root}/lib/libtorch_xpu.so")
endif()
if(W4A8_STABLE_ABI)
  # Only headers, which are the same for every CPU: csrc/torch/CMakeLists.txt says what is linked.
  set(TORCH_INCLUDE_DIRS "${w4a8_torch_root}/include")
elseif(w4a8_torch_gpu)
  # What `pip install torch` brings on Linux. The config of such a torch demands the toolkit it was built with, of which
  # nothing is needed here: the libraries of the CPU are named directly.
  set(TORCH_INCLUDE_DIRS "${w4a8_torch_root}/include" "${w4a8_torch_root}/include/torch/csrc/api/include")
  set(TORCH_LIBRARIES "${w4a8_torch_root}/lib/libtorch_cpu.so" "${w4a8_torch_root}/lib/libc10.so")
  set(w4a8_torch_abi 1)
  if(Python_EXECUTABLE)
    execute_process(COMMAND ${Python_EXECUTABLE} -c "import torch; print(int(torch.compiled_with_cxx11_abi()))"
                    OUTPUT_VARIABLE w4a8_torch_abi OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  endif()
  set(TORCH_CXX_FLAGS "-D_GLIBCXX_USE_CXX11_ABI=${w4a8_torch_abi}")
else()
  find_package(Torch REQUIRED)
endif()
# torch's own config sets C++ flags for its ABI; everything that links torch must agree.
if(TORCH_CXX_FLAGS)
  separate_arguments(W4A8_TORCH_CXX_FLAGS NATIVE_COMMAND "${TORCH_CXX_FLAGS}")
endif()
