# SPDX-License-Identifier: Apache-2.0
# Build settings shared by every target, and kascade_library(): one folder of src/ = one library = one test program.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

add_compile_options(-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Wnon-virtual-dtor)
if(KASCADE_WERROR)
  add_compile_options(-Werror)
endif()
# a*b+c keeps the same bits in every build and for every caller; kernels ask for FMA by name.
add_compile_options(-ffp-contract=off)
if(KASCADE_SANITIZE)
  # g++ 12 with sanitizers mistakes members inside std::regex for uninitialised.
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
                      $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  add_link_options(-fsanitize=address,undefined)
endif()
if(KASCADE_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

find_program(KASCADE_CCACHE ccache)
if(KASCADE_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${KASCADE_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${KASCADE_CCACHE})
endif()

if(KASCADE_TESTS)
  enable_testing()
  find_package(GTest REQUIRED)
  add_custom_target(unit_tests)
endif()

find_package(hwy REQUIRED)
find_package(dnnl REQUIRED)
find_package(OpenMP REQUIRED)
find_path(HWY_INCLUDE_DIR hwy/highway.h REQUIRED)
find_library(PCRE2_LIBRARY pcre2-8 REQUIRED)
add_library(pcre2 INTERFACE)
target_link_libraries(pcre2 INTERFACE ${PCRE2_LIBRARY})
add_library(dnnl INTERFACE)
target_link_libraries(dnnl INTERFACE DNNL::dnnl)
# Highway is used as headers only: each instruction set is a translation unit of its own (kascade_isa_sources).
add_library(kascade_highway INTERFACE)

# The instruction sets that CPU kernels are compiled for; the best that the machine has is chosen when first used.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(KASCADE_CPU_ISAS baseline avx2 avx512 avx512_bf16)
else()
  set(KASCADE_CPU_ISAS baseline)
endif()
set(KASCADE_ISA_FLAGS_baseline "")
set(KASCADE_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c -mbmi -mbmi2 -mpclmul -maes)
set(KASCADE_ISA_FLAGS_avx512 ${KASCADE_ISA_FLAGS_avx2} -mavx512f -mavx512cd -mavx512bw -mavx512dq -mavx512vl)
# Highway's AVX3_DL set plus bf16 dot products: Zen 4 and later, Sapphire Rapids and later.
set(KASCADE_ISA_FLAGS_avx512_bf16 ${KASCADE_ISA_FLAGS_avx512} -mavx512vnni -mvpclmulqdq -mavx512vbmi -mavx512vbmi2
    -mvaes -mavx512vpopcntdq -mavx512bitalg -mgfni -mavx512bf16)

# kascade_isa_sources(TARGET FILE...): compiles each FILE once per instruction set, with KASCADE_ISA defined to its name,
# so FILE puts its code into namespace kascade::KASCADE_ISA. Such files use Highway statically (HWY_NAMESPACE is the only
# target) and instantiate no standard library templates: those would carry the wider instructions into shared symbols.
function(kascade_isa_sources target)
  foreach(isa IN LISTS KASCADE_CPU_ISAS)
    add_library(${target}_${isa} OBJECT ${ARGN})
    target_compile_definitions(${target}_${isa} PRIVATE KASCADE_ISA=${isa} HWY_COMPILE_ONLY_STATIC)
    target_compile_options(${target}_${isa} PRIVATE ${KASCADE_ISA_FLAGS_${isa}} -Wno-psabi -Wno-conversion -Wno-shadow
                           # g++ 12 mistakes the undefined operands inside its own AVX-512 intrinsics for ours.
                           $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized -Wno-maybe-uninitialized>)
    target_include_directories(${target}_${isa} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR}/include
                               ${CMAKE_CURRENT_SOURCE_DIR}/src)
    target_link_libraries(${target}_${isa} PRIVATE kascade_highway fmt::fmt)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${target}_${isa}>)
  endforeach()
endfunction()

# kascade_library(FOLDER DEPENDS ... PRIVATE_DEPENDS ...): every .cc of src/FOLDER (subfolders included), less *_test.cc,
# *_bench.cc and *_isa.cc, becomes kascade_FOLDER; *_isa.cc is compiled per instruction set; *_test.cc becomes the test
# program FOLDER_test, which links this library and nothing above it; *_bench.cc, if any, the program FOLDER_bench, which
# is built when asked for.
function(kascade_library folder)
  cmake_parse_arguments(arg "" "" "DEPENDS;PRIVATE_DEPENDS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/src/${folder}/*.cc)
  list(FILTER sources EXCLUDE REGEX "/src/${folder}/cuda/test/")  # kascade_cuda_test has them
  if(NOT KASCADE_CUDA)
    list(FILTER sources EXCLUDE REGEX "/src/${folder}/cuda/")
  endif()
  set(all_sources ${sources})
  set(test_sources ${sources})
  list(FILTER test_sources INCLUDE REGEX "_test\\.cc$")
  set(isa_sources ${sources})
  list(FILTER isa_sources INCLUDE REGEX "_isa\\.cc$")
  list(FILTER sources EXCLUDE REGEX "_(test|bench|isa)\\.cc$")
  set(deps)
  foreach(dep IN LISTS arg_DEPENDS)
    if(TARGET kascade_${dep})
      list(APPEND deps kascade_${dep})
    else()
      list(APPEND deps ${dep})
    endif()
  endforeach()
  if(NOT sources AND NOT isa_sources)
    add_library(kascade_${folder} INTERFACE)
    target_include_directories(kascade_${folder} INTERFACE ${CMAKE_CURRENT_SOURCE_DIR}/include
                               ${CMAKE_CURRENT_SOURCE_DIR}/src)
    target_link_libraries(kascade_${folder} INTERFACE ${deps})
    return()
  endif()
  add_library(kascade_${folder} STATIC ${sources})
  target_include_directories(kascade_${folder} PUBLIC ${CMAKE_CURRENT_SOURCE_DIR}/include
                             ${CMAKE_CURRENT_SOURCE_DIR}/src)
  target_link_libraries(kascade_${folder} PUBLIC ${deps} PRIVATE ${arg_PRIVATE_DEPENDS})
  if(isa_sources)
    kascade_isa_sources(kascade_${folder} ${isa_sources})
  endif()
  set(bench_sources ${all_sources})
  list(FILTER bench_sources INCLUDE REGEX "_bench\\.cc$")
  if(KASCADE_BENCHES AND bench_sources)
    add_executable(${folder}_bench EXCLUDE_FROM_ALL ${bench_sources})
    target_link_libraries(${folder}_bench PRIVATE kascade_${folder})
  endif()
  if(KASCADE_TESTS AND test_sources)
    add_executable(${folder}_test ${test_sources})
    target_link_libraries(${folder}_test PRIVATE kascade_${folder} GTest::gtest GTest::gmock GTest::gtest_main)
    target_compile_definitions(${folder}_test PRIVATE
                               KASCADE_FIXTURES="${CMAKE_CURRENT_SOURCE_DIR}/tests/fixtures")
    add_test(NAME ${folder} COMMAND ${folder}_test)
    # Tests check what they call; how fast they check it does not matter, how fast they compile does.
    target_compile_options(${folder}_test PRIVATE $<$<CONFIG:Release>:-O1>)
    add_dependencies(unit_tests ${folder}_test)
  endif()
endfunction()
