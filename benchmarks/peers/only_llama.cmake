# Included by CMake right after llama-cpp-python's project(). Its CMakeLists.txt forces llama.cpp's "common" library on in the
# cache; a plain variable stands before the cache, so this leaves out a library that the Python binding never loads.
set(LLAMA_BUILD_COMMON OFF)
