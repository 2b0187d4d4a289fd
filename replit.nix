{ pkgs }:
let
  cuda = pkgs.cudaPackages_13 or pkgs.cudaPackages;
  compiler = pkgs.gcc14;
in
{
  deps = [
    pkgs.python312
    compiler
    pkgs.cmake
    pkgs.ninja
    pkgs.pkg-config
    cuda.cudatoolkit
    cuda.nccl
  ];
  env = {
    CUDA_HOME = "${cuda.cudatoolkit}";
    LD_LIBRARY_PATH = pkgs.lib.makeLibraryPath [
      compiler.cc.lib
      pkgs.zlib
      cuda.cudatoolkit
      cuda.nccl
    ];
    CC = "${compiler}/bin/gcc";
    CXX = "${compiler}/bin/g++";
  };
}
