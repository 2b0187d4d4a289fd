set(modelled_folder ${CMAKE_SOURCE_DIR}/tests/cpu/instruction_sets/modelled)
set_source_files_properties(
  ${CMAKE_SOURCE_DIR}/native/cpu/kernels_avx512.cpp ${CMAKE_SOURCE_DIR}/native/cpu/kernels_amx.cpp
  ${CMAKE_SOURCE_DIR}/native/cpu/kernels_avx512_bf16.cpp
  PROPERTIES COMPILE_OPTIONS "${kernels_avx2_flags};-Wno-psabi;-isystem;${modelled_folder}")
set_source_files_properties(
  ${CMAKE_SOURCE_DIR}/native/cpu/machine.cpp PROPERTIES COMPILE_DEFINITIONS processor_runs=processor_runs_itself)
list(PREPEND GLINT_CPU_SOURCES ${modelled_folder}/processor.cpp)
