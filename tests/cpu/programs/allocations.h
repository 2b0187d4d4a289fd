#ifndef ALLOCATIONS_H
#define ALLOCATIONS_H

void start_counting(void);
long allocations_of_last_part(void);

#endif
