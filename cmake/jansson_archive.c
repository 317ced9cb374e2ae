/* Lets a distribution's libjansson.a become a part of libdeepwell.so. The archive is compiled for programs (-fPIE),
 * which a shared library can take as long as every variable that it uses is inside of the library. Only `stdin` is not:
 * json_loadf compares its argument with it to name the source in error messages. With --wrap=stdin the linker takes the
 * variable below, which equals no open file. */
#include <jansson.h>
#include <stdio.h>

__attribute__((visibility("hidden"))) FILE *__wrap_stdin;
