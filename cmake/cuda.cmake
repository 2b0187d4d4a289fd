find_package(CUDAToolkit 13.0 REQUIRED)

set(cuda_folder ${CMAKE_SOURCE_DIR}/native/cuda)
set(hopper_flags -gencode=arch=compute_90a,code=sm_90a -DGLINT_MULTIPLY=kWgmma)
set(portable_flags
  -gencode=arch=compute_90,code=[sm_90,compute_90]
  -gencode=arch=compute_100,code=sm_100 -DGLINT_MULTIPLY=kMmaSync)
set(hopper_flags_spill_bytes 160)
set(portable_flags_spill_bytes 160)
set(cuda_flags -std=c++20 -O3 --expt-relaxed-constexpr --Werror all-warnings -Xptxas -v -Xcompiler -fPIC
  -Xcompiler -fvisibility=hidden -I${CMAKE_SOURCE_DIR}/native -I${CMAKE_SOURCE_DIR}/native/include)

set(wgmma_sources ${cuda_folder}/kernels/attention/attention_prefill_hopper.cu)
set(multiply_sources
  ${cuda_folder}/kernels/gemm/gemm.cu
  ${cuda_folder}/kernels/moe/expert_down.cu
  ${cuda_folder}/kernels/moe/expert_gate_up.cu)
file(GLOB portable_sources CONFIGURE_DEPENDS ${cuda_folder}/*.cu ${cuda_folder}/memory/*.cu ${cuda_folder}/weights/*.cu
  ${cuda_folder}/comm/*.cu ${cuda_folder}/kernels/*/*.cu)
list(REMOVE_ITEM portable_sources ${wgmma_sources})
file(GLOB cuda_host_sources CONFIGURE_DEPENDS ${cuda_folder}/*.cpp ${cuda_folder}/memory/*.cpp
  ${cuda_folder}/weights/*.cpp ${cuda_folder}/comm/*.cpp)
file(GLOB cuda_test_kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/native/testing/cuda/*.cu)
file(GLOB cuda_test_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/native/testing/cuda/*.cpp)

function(compile_cuda objects architectures)
  foreach(source IN LISTS ARGN)
    file(RELATIVE_PATH name ${cuda_folder} ${source})
    set(object ${CMAKE_BINARY_DIR}/cuda/${architectures}/${name}.o)
    get_filename_component(folder ${object} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    add_custom_command(OUTPUT ${object} DEPENDS ${source} ${CMAKE_SOURCE_DIR}/scripts/nvcc_strict.sh DEPFILE ${object}.d
      COMMAND bash ${CMAKE_SOURCE_DIR}/scripts/nvcc_strict.sh ${${architectures}_spill_bytes} ${CUDAToolkit_NVCC_EXECUTABLE}
              -ccbin ${CMAKE_CXX_COMPILER} ${cuda_flags} ${${architectures}} -MD -MF ${object}.d -c ${source} -o ${object}
      COMMENT "nvcc ${name} ${architectures}" VERBATIM)
    list(APPEND made ${object})
  endforeach()
  set(${objects} ${made} PARENT_SCOPE)
endfunction()

compile_cuda(hopper_objects hopper_flags ${wgmma_sources} ${multiply_sources})
compile_cuda(portable_objects portable_flags ${portable_sources})
compile_cuda(cuda_test_objects portable_flags ${cuda_test_kernels})

add_library(glint_cuda_objects OBJECT ${cuda_host_sources})
target_link_libraries(glint_cuda_objects PUBLIC glint_core)
target_include_directories(glint_cuda_objects SYSTEM PUBLIC ${CUDAToolkit_INCLUDE_DIRS})
add_custom_target(glint_cuda_kernels DEPENDS ${hopper_objects} ${portable_objects})

function(add_cuda_library name)
  add_library(${name} SHARED ${hopper_objects} ${portable_objects} ${ARGN})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(${name} PRIVATE glint_core glint_cuda_objects CUDA::cudart_static)
  add_dependencies(${name} glint_cuda_kernels)
endfunction()

add_cuda_library(glint_cuda)
install(TARGETS glint_cuda LIBRARY DESTINATION glint/lib COMPONENT engine)
if(GLINT_TESTING)
  add_cuda_library(glint_cuda_test ${GLINT_ANY_TEST_SOURCES} ${cuda_test_sources} ${cuda_test_objects})
endif()
