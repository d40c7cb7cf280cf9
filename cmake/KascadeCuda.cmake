# SPDX-License-Identifier: Apache-2.0
# The CUDA kernels (KASCADE_CUDA=ON): those of src/FOLDER/cuda join kascade_FOLDER; those of attention and the C interface
# are libkascade_cuda.so too, which needs neither the rest of the library nor torch.
enable_language(CUDA)
find_package(CUDAToolkit 12.8 REQUIRED)
# CMake 3.25 knows no dialect flags of CUDA 13.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()

# Warning options of the C++ compiler are none of nvcc's.
get_directory_property(kascade_options COMPILE_OPTIONS)
set(kascade_host_options)
foreach(option IN LISTS kascade_options)
  list(APPEND kascade_host_options $<$<COMPILE_LANGUAGE:CXX>:${option}>)
endforeach()
set_directory_properties(PROPERTIES COMPILE_OPTIONS "${kascade_host_options}")

function(kascade_cuda_settings target)
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES 90a-real
                                             POSITION_INDEPENDENT_CODE ON CUDA_RUNTIME_LIBRARY Static)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xcompiler=-Wall>)
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include ${CMAKE_CURRENT_SOURCE_DIR}/src)
endfunction()

foreach(folder IN ITEMS attention ops)
  file(GLOB_RECURSE kascade_cuda_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/${folder}/cuda/*.cu)
  list(FILTER kascade_cuda_sources EXCLUDE REGEX "/src/${folder}/cuda/test/")
  add_library(kascade_${folder}_cuda OBJECT ${kascade_cuda_sources})
  kascade_cuda_settings(kascade_${folder}_cuda)
  target_sources(kascade_${folder} PRIVATE $<TARGET_OBJECTS:kascade_${folder}_cuda>)
  target_compile_definitions(kascade_${folder} PUBLIC KASCADE_CUDA)
  target_link_libraries(kascade_${folder} PUBLIC CUDA::cudart_static)
endforeach()
target_link_libraries(kascade_ops PUBLIC CUDA::cublasLt)

add_library(kascade_cuda SHARED $<TARGET_OBJECTS:kascade_attention_cuda>
            ${CMAKE_CURRENT_SOURCE_DIR}/src/attention/params.cc ${CMAKE_CURRENT_SOURCE_DIR}/src/attention/check.cc)
target_include_directories(kascade_cuda PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include ${CMAKE_CURRENT_SOURCE_DIR}/src)
target_link_libraries(kascade_cuda PRIVATE kascade_base CUDA::cudart_static)
set_target_properties(kascade_cuda PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib LINKER_LANGUAGE CXX)

if(KASCADE_TESTS)
  # One program for the tests of all folders that need a device.
  file(GLOB kascade_cuda_test_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/*/cuda/test/*.cu
       ${CMAKE_CURRENT_SOURCE_DIR}/src/*/cuda/test/*.cc)
  add_executable(kascade_cuda_test ${kascade_cuda_test_sources} src/engine/tiny_model_test.cc)
  kascade_cuda_settings(kascade_cuda_test)
  target_link_libraries(kascade_cuda_test PRIVATE kascade_engine GTest::gtest GTest::gmock)
  add_test(NAME cuda_host COMMAND kascade_cuda_test --suite host)
  set_tests_properties(cuda_host PROPERTIES LABELS cuda_host)
  add_test(NAME cuda_device COMMAND kascade_cuda_test --suite all)
  set_tests_properties(cuda_device PROPERTIES LABELS cuda_device SKIP_RETURN_CODE 77)
endif()
